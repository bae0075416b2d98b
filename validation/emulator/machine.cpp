// Runs the blocks of a launch, one after the other or some at a time, and watches what their
// threads touch.
#include "machine.hpp"

#include <dlfcn.h>
#include <execinfo.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <utility>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define ASAN_UNPOISON_MEMORY_REGION(at, size)
#define ASAN_POISON_MEMORY_REGION(at, size)
#endif

alignas(1024) unsigned char shared_bytes[kSharedLimit];

namespace machine {

Thread* current;
Dim3 block_index, grid_size, block_size;
Block* block;
size_t shared_size;
using RunEntry = void (*)(const char* entry, const void* params);  // entry.cpp
static RunEntry run_entry;
static const char* entry;
static const void* entry_params;
static std::string failure;
static uint32_t shadow[kSharedLimit];
// More turns of a block's threads than any test takes, or loads and stores of one turn: a loop
// without an end, which a deadlock would be in other kernels.
constexpr uint64_t kEndless = 1 << 26;
static uint64_t accesses;

// -------------------------------------------------------------------------------------- scheduling
uint64_t Block::random(uint64_t below) {  // xorshift64*
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return (state * 2685821657736338717ull >> 33) * below >> 31;
}

void Products::advance() {
  const Action action = std::move(queue.front().second);
  action();
  queue.pop_front();
  for (size_t i = 0; i < parked.size();) {
    if (over(parked[i].first)) {
      wake(*parked[i].second);
      parked[i] = parked.back();
      parked.pop_back();
    } else {
      ++i;
    }
  }
}

bool Block::advance() {
  Products* asked[8];
  size_t warpgroups = 0;
  for (Products& one : products) {
    if (!one.queue.empty()) asked[warpgroups++] = &one;
  }
  const size_t copies = copies_last && warpgroups > 0 ? 0 : pending.size();
  const size_t choices = copies + warpgroups;
  if (choices == 0) return false;
  const size_t newest = std::max<size_t>(copies, 1) - 1;
  const size_t choice = order == 0 ? random(choices) : order == 1 ? 0 : newest;
  if (choice < copies) {
    pending.take(choice)();
  } else {
    asked[choice - copies]->advance();
  }
  return true;
}

std::string Block::places() const {
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

constexpr size_t kStack = 128 << 10;
struct Unmap {
  void operator()(char* stack) const { munmap(stack, kStack); }
};
// Kept from block to block. Fresh pages, because those of the heap may have been touched before, and
// no huge ones: of a stack little is used, and only that takes room then.
static char* stack_of(size_t thread) {
  static std::vector<std::unique_ptr<char, Unmap>> stacks;
  while (stacks.size() <= thread) {
    void* made = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) throw std::runtime_error("no memory for a thread's stack");
    madvise(made, kStack, MADV_NOHUGEPAGE);
    stacks.emplace_back(static_cast<char*>(made));
  }
  ASAN_UNPOISON_MEMORY_REGION(stacks[thread].get(), kStack);
  return stacks[thread].get();
}

#if defined(__SANITIZE_ADDRESS__)
bool checking = false;
static const void* scheduler_stack;
static size_t scheduler_stack_size;
static void switch_to_scheduler(Fiber& fiber, bool forever) {
  __sanitizer_start_switch_fiber(forever ? nullptr : &fiber.fake_stack, scheduler_stack,
                                 scheduler_stack_size);
  change(fiber.context, block->scheduler);
  __sanitizer_finish_switch_fiber(fiber.fake_stack, nullptr, nullptr);
}
static void switch_to(Fiber& fiber) {
  void* mine;
  __sanitizer_start_switch_fiber(&mine, fiber.stack, kStack);
  change(block->scheduler, fiber.context);
  __sanitizer_finish_switch_fiber(mine, nullptr, nullptr);
}
static void entered(Fiber& fiber) {
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &scheduler_stack, &scheduler_stack_size);
}
#else
bool checking = true;
static void switch_to_scheduler(Fiber& fiber, bool) { change(fiber.context, block->scheduler); }
static void switch_to(Fiber& fiber) { change(block->scheduler, fiber.context); }
static void entered(Fiber&) {}
#endif

// The callers of what goes wrong, as offsets in the kernel's library; Python makes lines of them.
static std::string callers() {
  void* frames[32];
  const int count = backtrace(frames, 32);
  Dl_info own, info;
  if (dladdr(reinterpret_cast<const void*>(run_entry), &own) == 0) return "";
  char text[32];
  std::string all;
  for (int i = 0; i < count; ++i) {
    if (dladdr(frames[i], &info) == 0 || info.dli_fbase != own.dli_fbase) continue;
    const auto* at = static_cast<const char*>(frames[i]) - 1;
    std::snprintf(text, sizeof text, " +0x%tx", at - static_cast<const char*>(info.dli_fbase));
    all += text;
  }
  return all;
}

// From a thread it goes to the scheduler for good; what the thread holds is lost.
void fail(const std::string& what) {
  std::string thread;
  if (current != nullptr) thread = "thread " + std::to_string(current->tid.x) + ": ";
  const std::string text = thread + what + ";" + block->places();
  if (current == nullptr) throw std::runtime_error(text);
  failure = text + callers();
  while (true) switch_to_scheduler(self(), true);
}

void sleep(const char* where) {
  Fiber& fiber = self();
  fiber.where = where;
  switch_to_scheduler(fiber, false);
  fiber.where = "running";
}

void wake(Fiber& fiber) {
  (fiber.tid.x / 32 == block->slow ? block->held : block->runnable).push_back(&fiber);
}

void wake(Parked& parked) {
  for (Fiber* fiber : parked) wake(*fiber);
  parked.clear();
}

void take_turns() {
  wake(self());
  sleep("running");
}

static void enter() {
  entered(self());
  run_entry(entry, entry_params);
  Fiber& fiber = self();
  for (const Meeting* one :
       {&block->warps[fiber.tid.x / 32], &block->warpgroups[fiber.tid.x / 128]}) {
    if (one->came > 0) fail(std::string("it leaves, others wait for it at ") + one->what);
  }
  fiber.ended = true;
  switch_to_scheduler(fiber, true);
}

static void start_block(Block& b, unsigned threads) {
  b.left = threads;
  for (unsigned i = 0; i < threads; ++i) {
    b.fibers.push_back(std::make_unique<Fiber>());
    Fiber& fiber = *b.fibers.back();
    fiber.tid.x = i;
    fiber.stack = stack_of(b.slot * 1024 + i);
    // Not all at the same distance from a power of two, where they would share few lines of a cache.
    begin_at(fiber.context, fiber.stack, kStack - i * 17 % 256 * 64, enter);
    b.runnable.push_back(&fiber);
  }
}

// Takes out the fiber that runs next; null when none can go on.
static Fiber* next_fiber(Block& b) {
  const auto take = [](auto& from, size_t i) {
    const auto taken = std::exchange(from[i], from.back());
    from.pop_back();
    return taken;
  };
  const auto can = [](const Watched& one) { return *one.address != one.before; };
  const size_t runnable = b.runnable.size(), all = runnable + b.watched.size();
  const size_t pick = all > 0 && (b.held.empty() || b.random(64) > 0) ? b.random(all) : all;
  if (pick < runnable) return take(b.runnable, pick);
  if (pick < all && can(b.watched[pick - runnable])) {
    return take(b.watched, pick - runnable).fiber;
  }
  if (pick < all && runnable > 0) return take(b.runnable, b.random(runnable));
  if (!b.held.empty()) return take(b.held, b.random(b.held.size()));
  for (size_t i = 0; i < all; ++i) {
    const size_t at = (pick + i) % all;
    if (can(b.watched[at])) return take(b.watched, at).fiber;
  }
  return nullptr;
}

// Those who wait for a while have waited long enough; whether there are any.
static bool send_on(Block& b) {
  for (auto& [address, barrier] : b.barriers) wake(barrier.parked);
  for (const Watched& one : b.watched) wake(*one.fiber);
  b.watched.clear();
  return !b.runnable.empty() || !b.held.empty();
}

// A block's turn of so many steps, or until nobody can go on; whether it has ended.
static bool run_block(Block& b, uint64_t steps) {
  b.stuck = false;
  b.idle = 0;
  for (; b.left > 0 && steps > 0; --steps) {
    ++b.steps;
    if (b.patience > 0 && b.random(b.patience) == 0) b.advance();
    if (b.steps > kEndless) throw std::runtime_error("it does not end;" + b.places());
    Fiber* fiber = next_fiber(b);
    if (fiber != nullptr) {
      accesses = 0;
      current = fiber;
      switch_to(*fiber);
      current = nullptr;
      if (!failure.empty()) throw std::runtime_error(failure);
      b.left -= fiber->ended;
      continue;
    }
    if (b.advance()) continue;
    if (!send_on(b) || ++b.idle > 8) {
      b.stuck = true;
      return false;
    }
  }
  if (b.left > 0) return false;
  while (b.advance()) {
  }
  return true;
}

// Gives shared memory to a block.
static void enter_block(Block& b) {
  block = &b;
  block_index.x = b.index;
  if (b.memory.empty()) {
    std::memset(shared_bytes, 0xff, shared_size);  // NaN, for who reads too early
    fill(0, static_cast<int>(shared_size), kNothing);
  } else {
    std::memcpy(shared_bytes, b.memory.data(), shared_size);
    std::copy(b.memory_holds.begin(), b.memory_holds.end(), shadow);
  }
}
static void leave_block(Block& b) {
  b.memory.assign(shared_bytes, shared_bytes + shared_size);
  b.memory_holds.assign(shadow, shadow + shared_size);
}

static std::unique_ptr<Block> make_block(unsigned index, unsigned slot, unsigned threads,
                                         uint64_t seed) {
  auto b = std::make_unique<Block>();
  b->index = index;
  b->slot = slot;
  b->state = (seed + 1) * 0x9e3779b97f4a7c15ull + index * 0xbf58476d1ce4e5b9ull | 1;
  constexpr uint64_t kPatience[] = {0, 2, 8, 64, 1024};
  b->patience = kPatience[b->random(5)];
  b->copies_last = b->random(2) == 0;
  b->order = static_cast<int>(b->random(3));
  if (b->random(2) == 0) b->slow = static_cast<unsigned>(b->random((threads + 31) / 32));
  start_block(*b, threads);
  return b;
}

// Runs all blocks, up to so many of them by turns; they begin in the order of their index.
static void run_grid(unsigned blocks, unsigned threads, uint64_t seed, unsigned together) {
  Block chance;  // whose turn it is, and for how long
  chance.state = (seed + 1) * 0x94d049bb133111ebull | 1;
  std::vector<std::unique_ptr<Block>> running(std::min(together, blocks));
  unsigned next = 0, left = blocks;
  size_t vain = 0;  // turns in a row in which nobody could go on
  for (size_t turn = 0; left > 0; ++turn) {
    for (unsigned slot = 0; slot < running.size() && next < blocks; ++slot) {
      if (!running[slot]) running[slot] = make_block(next++, slot, threads, seed);
    }
    // One that waits for another block to go on lets the next one try.
    if (vain == 0) turn = chance.random(running.size());
    auto& b = running[turn % running.size()];
    if (!b) continue;
    constexpr uint64_t kSteps[] = {100, 1000, 10000, 100000};
    enter_block(*b);
    if (run_block(*b, together > 1 ? kSteps[chance.random(4)] : ~uint64_t(0))) {
      b.reset();
      --left;
      vain = 0;
      continue;
    }
    leave_block(*b);
    vain = b->stuck ? vain + 1 : 0;
    if (vain <= 2 * running.size()) continue;
    std::string text = "deadlock;";
    for (const auto& one : running) text += one ? one->places() : "";
    throw std::runtime_error(text);
  }
}

long long clock() {
  take_turns();
  return static_cast<long long>(100 * block->steps);
}

// ----------------------------------------------------------------------------------------- barriers
void arrive_named(int id, int threads) {
  auto& barrier = block->named[id];
  if (barrier.came == 0) barrier.threads = threads;
  if (barrier.threads != threads) fail("a named barrier of two sizes");
  if (++barrier.came == threads) {
    barrier.came = 0;
    wake(barrier.parked);
  }
}

void sync_named(int id, int threads) {
  auto& barrier = block->named[id];
  arrive_named(id, threads);
  if (barrier.came > 0) {
    barrier.parked.push_back(&self());
    sleep("bar.sync");
  }
}

void make_barrier(uint32_t address, int arrivals) {
  shared_at(address, 8, 8);
  Barrier& barrier = block->barriers[address];
  wake(barrier.parked);
  barrier = {arrivals, arrivals, 0, 0, {}};
}

static Barrier& barrier_at(uint32_t address) {
  const auto found = block->barriers.find(address);
  if (found == block->barriers.end()) fail("an mbarrier that was not made");
  return found->second;
}

void progress(uint32_t address, int arrivals, long bytes) {
  Barrier& barrier = barrier_at(address);
  block->idle = 0;
  barrier.missing -= arrivals;
  barrier.bytes += bytes;
  if (barrier.missing < 0) fail("more arrivals at an mbarrier than it expects");
  if (barrier.missing == 0 && barrier.bytes == 0) {
    ++barrier.phase;
    barrier.missing = barrier.arrivals;
    wake(barrier.parked);
  }
}

void arrive(uint32_t address, uint32_t bytes) {
  progress(address, 0, -static_cast<long>(bytes));
  progress(address, 1, 0);
}

// "Waits a while": sometimes not at all, and no longer than until nothing else can go on.
bool try_wait(uint32_t address, uint32_t parity) {
  Barrier& barrier = barrier_at(address);
  const auto over = [&barrier, parity] { return (barrier.phase & 1) != parity; };
  if (!over() && block->random(16) > 0) {
    barrier.parked.push_back(&self());
    sleep("mbarrier");
  }
  return over();
}

// A thread that gets the same answer twice asks in a loop: mostly it then waits for another one, or
// until nothing else can go on.
uint32_t load_acquire(const uint32_t* address) {
  Fiber& fiber = self();
  const uint32_t before = *address;
  if (fiber.asked == address && fiber.answer == before && block->random(16) > 0) {
    block->watched.push_back({&fiber, address, before});
    sleep("ld.acquire");
  }
  fiber.asked = address;
  fiber.answer = *address;
  return fiber.answer;
}

void add_release(uint32_t* address, uint32_t x) {
  *address += x;
  block->idle = 0;
}

// ------------------------------------------------------------------------ what shared memory holds
constexpr uint32_t kFences = (1 << 20) - 1;

uint32_t writing(const Fiber& fiber) { return (fiber.tid.x + 2) << 20 | (block->fences & kFences); }
void fence_proxy() { self().fence = ++block->fences; }

static bool has_fenced(const Fiber& fiber, uint32_t since) {
  const uint32_t later = (fiber.fence - since) & kFences;
  return fiber.fence != 0 && later != 0 && later <= kFences / 2;
}

void fill(uint32_t address, int bytes, uint32_t with) {
  if (checking) std::fill_n(shadow + address, bytes, with);
}

// Whether a byte holds nothing. Without a branch for each, and of 4 and 16, as most are, unrolled.
template <int kBytes>
static bool any_empty(const uint32_t* holds) {
  uint32_t empty = 0;
  for (int i = 0; i < kBytes; ++i) empty |= holds[i] == kNothing;
  return empty != 0;
}
static bool any_empty(const uint32_t* holds, int bytes) {
  if (bytes == 4) return any_empty<4>(holds);
  if (bytes == 16) return any_empty<16>(holds);
  uint32_t empty = 0;
  for (int i = 0; i < bytes; ++i) empty |= holds[i] == kNothing;
  return empty != 0;
}

void check_filled(const char* who, uint32_t address, int bytes) {
  if (!checking || !any_empty(shadow + address, bytes)) return;
  const auto at = std::find(shadow + address, shadow + address + bytes, kNothing) - shadow;
  fail(std::string(who) + " reads shared memory that holds nothing, or not yet: byte " +
       std::to_string(at));
}

void check_fenced(const char* who, uint32_t address, int bytes) {
  uint32_t seen = kAnyone;  // what the byte before holds
  for (uint32_t at = address; checking && at < address + bytes; ++at) {
    if (shadow[at] <= kAnyone || shadow[at] == seen) continue;
    seen = shadow[at];
    const uint32_t writer = (seen >> 20) - 2;
    if (!has_fenced(*block->fibers[writer], seen) && !has_fenced(self(), seen)) {
      fail(std::string(who) + " without fence.proxy.async after what thread " +
           std::to_string(writer) + " has written: byte " + std::to_string(at));
    }
  }
}

unsigned char* shared_at(uint32_t address, int bytes, int alignment) {
  if (address % static_cast<uint32_t>(alignment)) fail("misaligned address in shared memory");
  if (address + static_cast<size_t>(bytes) > shared_size) fail("address beyond shared memory");
  return shared_bytes + address;
}

uint32_t shared_address(const void* pointer) {
  const auto offset = static_cast<const unsigned char*>(pointer) - shared_bytes;
  if (offset < 0 || static_cast<size_t>(offset) >= shared_size) fail("not in shared memory");
  return static_cast<uint32_t>(offset);
}

void load_shared(void* to, uint32_t address, int bytes) {
  const void* from = shared_at(address, bytes, bytes);
  check_filled("ld.shared", address, bytes);
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

void store_shared(uint32_t address, const void* from, int bytes) {
  std::memcpy(shared_at(address, bytes, bytes), from, static_cast<size_t>(bytes));
  fill(address, bytes, writing(self()));
}

// ------------------------------------------------------------------------ registers of products
static bool in_flight(const Fiber& fiber, const Registers& r) { return r.group >= fiber.waited; }

void fence_registers() {
  ++self().fenced;
  for (auto& r : self().registers) r.touched = false;
}

void lend(const void* registers, size_t bytes) {
  Fiber& fiber = self();
  const auto low = reinterpret_cast<uintptr_t>(registers), high = low + bytes;
  auto& known = fiber.registers;
  bool touched = fiber.fenced == 0;
  for (size_t i = 0; i < known.size();) {
    const bool overlap = known[i].low < high && low < known[i].high;
    touched = touched || (overlap && known[i].touched);
    if (overlap && (known[i].low >= low && known[i].high <= high)) {
      known.erase(known.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  if (touched && checking) fail("wgmma without wgmma.fence after its registers were touched");
  known.push_back({low, high, fiber.groups, false});
  fiber.low = std::min(fiber.low, low);
  fiber.high = std::max(fiber.high, high);
}

// ---------------------------------------------------------------------------------------- accesses
// A kernel is compiled as for ThreadSanitizer, so that each of its loads and stores calls one of
// the functions below; that tool's own library is not linked.
static void access(const void* pointer, size_t bytes, bool write, bool aligned, bool each = true) {
  const auto at = reinterpret_cast<uintptr_t>(pointer);
  const size_t offset = at - reinterpret_cast<uintptr_t>(shared_bytes);
  if (offset < kSharedLimit) {
    const auto address = static_cast<uint32_t>(offset);
    const int size = static_cast<int>(bytes);
    shared_at(address, size, aligned ? size : 1);
    if (write) return fill(address, size, writing(self()));
    // Each byte has to be there, but of a struct copied whole, which may have padding.
    const uint32_t* first = shadow + address;
    if (each || std::count(first, first + size, kNothing) == size) {
      check_filled("a load", address, size);
    }
    return;
  }
  if (current == nullptr) return;
  if (++accesses > kEndless) fail("it does not end");
  Fiber& fiber = self();
  if (at >= fiber.high || at + bytes <= fiber.low) return;
  for (auto& r : fiber.registers) {
    if (at >= r.high || at + bytes <= r.low) continue;
    if (in_flight(fiber, r)) {
      fail(std::string(write ? "a store to" : "a load from") + " registers of a wgmma in flight");
    }
    r.touched = true;
  }
}

}  // namespace machine

#pragma GCC visibility push(default)
extern "C" {
#define ACCESS(n)                                                                 \
  void __tsan_read##n(void* p) { machine::access(p, n, false, true); }            \
  void __tsan_write##n(void* p) { machine::access(p, n, true, true); }            \
  void __tsan_unaligned_read##n(void* p) { machine::access(p, n, false, false); } \
  void __tsan_unaligned_write##n(void* p) { machine::access(p, n, true, false); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* p, size_t n) { machine::access(p, n, false, false, false); }
void __tsan_write_range(void* p, size_t n) { machine::access(p, n, true, false); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

// Returns 0, or 1 with what went wrong in `message`.
int emulate(machine::RunEntry run_entry, const char* entry, unsigned blocks, unsigned threads,
            size_t shared, uint64_t seed, bool truncating, unsigned together, const void* params,
            char* message, size_t message_size) {
  static std::mutex one_launch;
  const std::lock_guard lock(one_launch);
  machine::failure.clear();
  machine::run_entry = run_entry;
  machine::entry = entry;
  machine::entry_params = params;
  machine::shared_size = shared;
  machine::truncating = truncating;
  machine::grid_size.x = blocks;
  machine::block_size.x = threads;
  ASAN_UNPOISON_MEMORY_REGION(shared_bytes, kSharedLimit);
  ASAN_POISON_MEMORY_REGION(shared_bytes + shared, kSharedLimit - shared);
  try {
    machine::run_grid(blocks, threads, seed, together);
  } catch (const std::exception& error) {
    machine::current = nullptr;
    std::snprintf(message, message_size, "%s", error.what());
    return 1;
  }
  return 0;
}
}
#pragma GCC visibility pop
