// A block of a GPU on the CPU: threads are fibers, warps and warpgroups act when all their threads
// have come, copies and products that run beside the threads happen at a random moment before the
// wait that promises them.  One seed decides which fiber runs next and when that moment is.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

struct Dim3 {
  unsigned x = 0, y = 0, z = 0;
};

// Where dynamic shared memory lies; kernels declare it `extern`.
constexpr size_t kSharedLimit = 227 * 1024;
extern "C" unsigned char shared_bytes[kSharedLimit];

namespace machine {

using Ready = std::function<bool()>;
using Action = std::function<void()>;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  Dim3 tid;
  Ready ready;             // empty: it can go on
  const char* where = "";  // what it waits for
  bool ended = false;
  // Copies that this thread asked for: those of the open group, and the closed groups.
  std::vector<std::shared_ptr<bool>> open_copies;
  std::deque<std::vector<std::shared_ptr<bool>>> copy_groups;
  std::vector<std::shared_ptr<int>> open_stores;  // 0: asked for, 1: source read, 2: written
  std::deque<std::vector<std::shared_ptr<int>>> store_groups;
};

// Threads that meet: the last to come acts for all.
struct Meeting {
  int came = 0;
  uint64_t times = 0;
  const char* what = nullptr;
  std::vector<void*> arguments;
};

struct Barrier {  // an mbarrier
  int arrivals = 0, missing = 0;
  long bytes = 0;
  uint32_t phase = 0;
};

struct NamedBarrier {
  int threads = 0, came = 0;
  uint64_t times = 0;
};

// Products that a warpgroup has asked for, in order; a group is closed by a commit of all its
// threads.
struct Products {
  std::deque<Action> queue;
  std::deque<int> groups;  // products of the queue that each closed group still has
  int open = 0;
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  Fiber* current = nullptr;
  ucontext_t scheduler;
  Dim3 block_index, grid, block_size;
  std::vector<Action> pending;                      // copies under way
  std::map<std::pair<int, int>, Meeting> meetings;  // (threads, number among those of that size)
  std::map<uint32_t, Barrier> barriers;
  std::map<int, NamedBarrier> named;
  std::map<int, Products> products;
  uint64_t state = 1;
  // What runs beside the threads gets on at one of so many steps of theirs, and when none can go
  // on. At 0 that is the only time: whoever does not wait finds nothing there.
  uint64_t patience = 8;
  bool copies_last = false;  // a copy happens only when no product can

  uint64_t random(uint64_t below) {  // xorshift64*
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (state * 2685821657736338717ull >> 33) % below;
  }

  void advance_products(Products& p) {
    Action action = std::move(p.queue.front());
    p.queue.pop_front();
    action();
    if (!p.groups.empty()) {
      if (--p.groups.front() == 0) p.groups.pop_front();
    } else {
      --p.open;
    }
  }

  // Lets one thing that runs beside the threads happen; whether there was one.
  bool advance() {
    for (auto& [warpgroup, p] : products) {
      if (copies_last && !p.queue.empty()) {
        advance_products(p);
        return true;
      }
    }
    const size_t choices = pending.size() + products.size();
    if (choices == 0) return false;
    const size_t first = random(choices);
    for (size_t i = 0; i < choices; ++i) {
      const size_t choice = (first + i) % choices;
      if (choice < pending.size()) {
        Action action = std::move(pending[choice]);
        pending.erase(pending.begin() + choice);
        action();
        return true;
      }
      auto it = products.begin();
      std::advance(it, choice - pending.size());
      if (!it->second.queue.empty()) {
        advance_products(it->second);
        return true;
      }
    }
    return false;
  }

  std::string places() const {
    std::map<std::string, std::set<unsigned>> found;
    for (const auto& fiber : fibers) {
      if (!fiber->ended) found[fiber->where].insert(fiber->tid.x / 32);
    }
    std::string text;
    for (const auto& [where, warps] : found) {
      text += " [" + where + ": warps";
      for (unsigned warp : warps) text += " " + std::to_string(warp);
      text += "]";
    }
    return text;
  }
};

inline Block* block = nullptr;

[[noreturn]] inline void fail(const std::string& what) {
  throw std::runtime_error(what + ";" + block->places());
}

inline void yield() { swapcontext(&block->current->context, &block->scheduler); }

inline void wait_until(const char* where, Ready ready) {
  Fiber* self = block->current;
  self->where = where;
  self->ready = std::move(ready);
  yield();
  self->where = "running";
}

// `count` threads, 32 or 128, meet; `act` sees all their arguments, in the order of their lanes.
template <typename Argument, typename Act>
void meet(int count, const char* what, Argument& argument, Act act) {
  const int thread = block->current->tid.x;
  Meeting& meeting = block->meetings[{count, thread / count}];
  if (meeting.came == 0) {
    meeting.what = what;
    meeting.arguments.assign(count, nullptr);
  } else if (std::strcmp(meeting.what, what) != 0) {
    fail(std::string("threads of one warp are at ") + meeting.what + " and at " + what);
  }
  meeting.arguments[thread % count] = &argument;
  if (++meeting.came == count) {
    meeting.came = 0;
    act(reinterpret_cast<Argument**>(meeting.arguments.data()));
    ++meeting.times;
  } else {
    const uint64_t before = meeting.times;
    wait_until(what, [&meeting, before] { return meeting.times != before; });
  }
  if (block->random(4) == 0) wait_until("running", {});
}

inline uint32_t shared_address(const void* pointer) {
  const auto* byte = static_cast<const unsigned char*>(pointer);
  if (byte < shared_bytes || byte >= shared_bytes + kSharedLimit) fail("not in shared memory");
  return static_cast<uint32_t>(byte - shared_bytes);
}

inline unsigned char* shared_at(uint32_t address, int bytes, int alignment = 1) {
  if (address % alignment) fail("misaligned address in shared memory");
  if (address + bytes > kSharedLimit) fail("address beyond shared memory");
  return shared_bytes + address;
}

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float widen(uint16_t bits, bool bf16) {
  if (bf16) return from_bits(uint32_t(bits) << 16);
  _Float16 x;
  std::memcpy(&x, &bits, 2);
  return static_cast<float>(x);
}

inline uint16_t narrow(float x, bool bf16) {
  if (!bf16) {
    const _Float16 half = static_cast<_Float16>(x);
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
  }
  const uint32_t bits = to_bits(x);
  if (std::isnan(x)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// An arrival, or bytes that have landed; the phase ends when neither is missing.
inline void progress(uint32_t address, int arrivals, long bytes) {
  auto found = block->barriers.find(address);
  if (found == block->barriers.end()) fail("an mbarrier that was not made");
  Barrier& barrier = found->second;
  barrier.missing -= arrivals;
  barrier.bytes += bytes;
  if (barrier.missing < 0) fail("more arrivals at an mbarrier than it expects");
  if (barrier.missing == 0 && barrier.bytes == 0) {
    ++barrier.phase;
    barrier.missing = barrier.arrivals;
  }
}

}  // namespace machine
