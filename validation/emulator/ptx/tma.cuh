// As ptx/tma.cuh.  A tensor map holds pointer, shape, strides (the last is the item size) and box
// of five axes, the contiguous one last (validation/emulator/__init__.py); boxes have 128-byte rows
// and that swizzle.
#pragma once
#include "ptx/types.cuh"

struct alignas(64) TensorMap {
  uint64 words[16];
  uint64 pointer() const { return words[0]; }
  int64 shape(int axis) const { return int64(words[1 + axis]); }
  int64 stride(int axis) const { return axis == 4 ? 2 : int64(words[6 + axis]); }
  int64 box(int axis) const { return int64(words[11 + axis]); }
};

constexpr uint64 kEvictFirst = 0x12F0000000000000;
constexpr uint64 kEvictLast = 0x14F0000000000000;

FA_DEVICE void prefetch_tensormap(const TensorMap*) {}

// Calls f(global address or null, shared address) for each 16 bytes of a box, in order.
template <typename F>
void each_chunk(const TensorMap& map, uint32 shared, const int (&c)[5], const F& f) {
  if (map.box(4) != 64) machine::fail("a box of other than 64 columns");
  int64 row = 0;
  for (int64 i0 = 0; i0 < map.box(0); ++i0) {
    for (int64 i1 = 0; i1 < map.box(1); ++i1) {
      for (int64 i2 = 0; i2 < map.box(2); ++i2) {
        for (int64 i3 = 0; i3 < map.box(3); ++i3, ++row) {
          const int64 at[4] = {c[4] + i0, c[3] + i1, c[2] + i2, c[1] + i3};
          bool inside = true;
          uint64 address = map.pointer();
          for (int axis = 0; axis < 4; ++axis) {
            inside = inside && at[axis] >= 0 && at[axis] < map.shape(axis);
            address += uint64(at[axis] * map.stride(axis));
          }
          for (int64 chunk = 0; chunk < 8; ++chunk) {
            const int64 col = c[0] + 8 * chunk;
            const bool here = inside && col >= 0 && col < map.shape(4);
            auto* global = reinterpret_cast<unsigned char*>(address + uint64(2 * col));
            f(here ? global : nullptr, shared + uint32(row * 128 + ((chunk ^ (row & 7)) << 4)));
          }
        }
      }
    }
  }
}

FA_DEVICE void cp_async_bulk_tensor_5d_load(uint32 shared, const TensorMap* map, uint32 barrier,
                                            uint64, int c0, int c1, int c2, int c3, int c4) {
  if (shared % 1024) machine::fail("a box that does not start at a multiple of 1024 bytes");
  machine::block->pending.push_back([=] {
    const int c[5] = {c0, c1, c2, c3, c4};
    long bytes = 0;
    each_chunk(*map, shared, c, [&](const unsigned char* global, uint32 at) {
      unsigned char* to = machine::shared_at(at, 16);
      if (global != nullptr) {
        std::memcpy(to, global, 16);
      } else {
        std::memset(to, 0, 16);
      }
      bytes += 16;
    });
    machine::progress(barrier, 0, bytes);
  });
}

// The source is read at one moment and written at a later one.
FA_DEVICE void cp_async_bulk_tensor_5d_store(const TensorMap* map, uint32 shared, uint64, int c0,
                                             int c1, int c2, int c3, int c4) {
  auto state = std::make_shared<int>(0);
  machine::block->current->open_stores.push_back(state);
  machine::block->pending.push_back([=] {
    const int c[5] = {c0, c1, c2, c3, c4};
    std::vector<unsigned char> data;
    std::vector<unsigned char*> places;
    each_chunk(*map, shared, c, [&](unsigned char* global, uint32 at) {
      const unsigned char* from = machine::shared_at(at, 16);
      data.insert(data.end(), from, from + 16);
      places.push_back(global);
    });
    *state = 1;
    machine::block->pending.push_back([=] {
      for (size_t i = 0; i < places.size(); ++i) {
        if (places[i] != nullptr) std::memcpy(places[i], &data[16 * i], 16);
      }
      *state = 2;
    });
  });
}
FA_DEVICE void cp_async_bulk_commit_group() {
  auto& self = *machine::block->current;
  self.store_groups.push_back(std::move(self.open_stores));
  self.open_stores.clear();
}
FA_DEVICE void wait_stores(size_t pending, int state, const char* where) {
  auto& self = *machine::block->current;
  machine::wait_until(where, [&self, pending, state] {
    for (size_t i = 0; i + pending < self.store_groups.size(); ++i) {
      for (const auto& store : self.store_groups[i]) {
        if (*store < state) return false;
      }
    }
    return true;
  });
}
template <int kPending>
FA_DEVICE void cp_async_bulk_wait_group() {
  wait_stores(kPending, 2, "cp.async.bulk.wait_group");
}
template <int kPending>
FA_DEVICE void cp_async_bulk_wait_group_read() {
  wait_stores(kPending, 1, "cp.async.bulk.wait_group.read");
}
FA_DEVICE void fence_proxy_async_shared() {}
