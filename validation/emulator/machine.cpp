// Runs the blocks of a launch one after the other.
#include "cuda.hpp"

alignas(1024) unsigned char shared_bytes[kSharedLimit];

void bar_arrive(int id, int threads) {
  auto& barrier = machine::block->named[id];
  if (barrier.came == 0) barrier.threads = threads;
  if (barrier.threads != threads) machine::fail("a named barrier of two sizes");
  if (++barrier.came == threads) {
    barrier.came = 0;
    ++barrier.times;
  }
}

void bar_sync(int id, int threads) {
  auto& barrier = machine::block->named[id];
  const uint64_t before = barrier.times;
  bar_arrive(id, threads);
  if (barrier.times == before) {
    machine::wait_until("bar.sync", [&barrier, before] { return barrier.times != before; });
  }
}

namespace machine {

using Kernel = std::function<void()>;
static const Kernel* kernel;
static std::string failure;

static void enter() {
  try {
    (*kernel)();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  block->current->ended = true;
  swapcontext(&block->current->context, &block->scheduler);
}

static void run_block(Block& b) {
  for (auto& fiber : b.fibers) {
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.data();
    fiber->context.uc_stack.ss_size = fiber->stack.size();
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, enter, 0);
  }
  size_t left = b.fibers.size();
  while (left > 0) {
    if (b.patience > 0 && b.random(b.patience) == 0) b.advance();
    // The next fiber that can go on, from a random place.
    const size_t first = b.random(b.fibers.size());
    bool ran = false;
    for (size_t i = 0; i < b.fibers.size() && !ran; ++i) {
      Fiber& fiber = *b.fibers[(first + i) % b.fibers.size()];
      if (fiber.ended || (fiber.ready && !fiber.ready())) continue;
      fiber.ready = nullptr;
      b.current = &fiber;
      swapcontext(&b.scheduler, &fiber.context);
      if (!failure.empty()) throw std::runtime_error(failure);
      left -= fiber.ended;
      ran = true;
    }
    if (!ran && !b.advance()) throw std::runtime_error("deadlock;" + b.places());
  }
  while (b.advance()) {
  }
}

}  // namespace machine

// Returns 0, or 1 with what went wrong in `message`.
extern "C" int emulate(unsigned blocks, unsigned threads, uint64_t seed, const void* params,
                       char* message, size_t message_size);

static int run_all(unsigned blocks, unsigned threads, uint64_t seed, const machine::Kernel& run,
                   char* message, size_t size) {
  machine::failure.clear();
  machine::kernel = &run;
  try {
    for (unsigned index = 0; index < blocks; ++index) {
      machine::Block b;
      machine::block = &b;
      b.state = (seed + 1) * 0x9e3779b97f4a7c15ull + index * 0xbf58476d1ce4e5b9ull | 1;
      constexpr uint64_t kPatience[] = {0, 2, 8, 64, 1024};
      b.patience = kPatience[b.random(5)];
      b.copies_last = b.random(2) == 0;
      b.block_index.x = index;
      b.grid.x = blocks;
      b.block_size.x = threads;
      std::memset(shared_bytes, 0xff, sizeof shared_bytes);  // NaN, for who reads too early
      for (unsigned i = 0; i < threads; ++i) {
        b.fibers.push_back(std::make_unique<machine::Fiber>());
        b.fibers.back()->tid.x = i;
        b.fibers.back()->stack.resize(128 << 10);
      }
      machine::run_block(b);
    }
  } catch (const std::exception& error) {
    std::snprintf(message, size, "%s", error.what());
    return 1;
  }
  return 0;
}

// The kernel's own source; its entry is ENTRY and takes one struct.
#include KERNEL

template <typename Params>
static Params params_type(void (*)(Params));

int emulate(unsigned blocks, unsigned threads, uint64_t seed, const void* params, char* message,
            size_t message_size) {
  using Params = decltype(params_type(&ENTRY));
  const Params& given = *static_cast<const Params*>(params);
  return run_all(blocks, threads, seed, [&] { ENTRY(given); }, message, message_size);
}
