// As ptx/cp_async.cuh: a copy happens at some moment before the wait that promises it.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE void cp_async_cg_16(uint32 address, const void* global, uint32 bytes) {
  unsigned char* to = machine::shared_at(address, 16, 16);
  if (bytes > 0 && reinterpret_cast<uintptr_t>(global) % 16) machine::fail("misaligned cp.async");
  auto done = std::make_shared<bool>(false);
  machine::block->current->open_copies.push_back(done);
  machine::block->pending.push_back([to, global, bytes, done] {
    std::memset(to, 0, 16);
    if (bytes > 0) std::memcpy(to, global, bytes);
    *done = true;
  });
}
FA_DEVICE void cp_async_commit_group() {
  auto& self = *machine::block->current;
  self.copy_groups.push_back(std::move(self.open_copies));
  self.open_copies.clear();
}
template <int kPending>
FA_DEVICE void cp_async_wait_group() {
  auto& self = *machine::block->current;
  machine::wait_until("cp.async.wait_group", [&self] {
    while (self.copy_groups.size() > kPending) {
      for (const auto& copy : self.copy_groups.front()) {
        if (!*copy) return false;
      }
      self.copy_groups.pop_front();
    }
    return true;
  });
}
