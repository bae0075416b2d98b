// Blocks of a GPU on the CPU: threads are fibers, warps and warpgroups act when all their threads
// have come, copies and products that run beside the threads happen at a random moment before the
// wait that promises them.  One seed decides which fiber runs next and when that moment is.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "context.hpp"
#include "engine.hpp"

constexpr size_t kSharedLimit = 227 * 1024;

namespace machine {

using Action = std::function<void()>;

// Registers that a thread has lent to the tensor cores.
struct Registers {
  uintptr_t low, high;
  uint64_t group;  // of products; in flight until that one has been waited for
  bool touched;    // since the last wgmma_fence
};

struct Fiber;
using Parked = std::vector<Fiber*>;  // who sleeps until something has happened

// The copies that a thread has asked for, by groups: of each how many have not been read at their
// source, and how many have not been written.  The last group is open.
struct CopyGroup {
  int unread = 0, unwritten = 0;
};
using Left = int CopyGroup::*;
class CopyGroups {
  std::vector<CopyGroup> groups{1};
  uint64_t first = 0;       // the number of the first one kept
  Fiber* waiter = nullptr;  // and for how much it waits
  size_t pending = 0;
  Left wanted = nullptr;

  bool over(size_t allowed, Left left) const;

 public:
  uint64_t add();  // a copy; returns the number of its group
  void done(uint64_t group, Left left);
  void commit();
  void wait(const char* where, int allowed, Left left);
};

struct Fiber : Thread {
  Context context;
  char* stack;
  void* fake_stack = nullptr;  // AddressSanitizer's
  const char* where = "running";
  bool ended = false;
  uint32_t fence = 0;               // of proxies, its last: the number in the block
  const uint32_t* asked = nullptr;  // the word that it asked for last, and what that was
  uint32_t answer = 0;
  CopyGroups copies, stores;  // cp.async, TMA
  std::vector<Registers> registers;
  uintptr_t low = ~uintptr_t(0), high = 0;      // bounds of them all
  uint64_t groups = 0, waited = 0, fenced = 0;  // groups of products; wgmma_fences
};

// Threads that meet: the last to come acts for all, and wakes them.
struct Meeting {
  int came = 0;
  const char* what = nullptr;
  void* arguments[128];
  Parked parked;
};

// What is under way, in the order in which it was asked for; one that is taken out of the middle
// has its place filled by the last one.
class Actions {
  std::deque<Action> actions;

 public:
  size_t size() const { return actions.size(); }
  void push_back(Action action) { actions.push_back(std::move(action)); }
  Action take(size_t i) {
    Action taken = std::move(actions[i]);
    if (i == 0) {
      actions.pop_front();
    } else {
      if (i + 1 < actions.size()) actions[i] = std::move(actions.back());
      actions.pop_back();
    }
    return taken;
  }
};

struct Barrier {  // an mbarrier
  int arrivals = 0, missing = 0;
  long bytes = 0;
  uint32_t phase = 0;
  Parked parked;  // until the phase ends, or nobody can go on
};

struct NamedBarrier {
  int threads = 0, came = 0;
  Parked parked;
};

// Products that a warpgroup has asked for, in order, with the number of their group; who sleeps
// until none of a group below a number is left.
struct Products {
  std::deque<std::pair<uint64_t, Action>> queue;
  std::vector<std::pair<uint64_t, Fiber*>> parked;

  bool over(uint64_t until) const { return queue.empty() || queue.front().first >= until; }
  void advance();
};

// A word of global memory that a thread waits for, until it is another one or nobody can go on.
// Whoever may change it does not say so: it is looked at in between.
struct Watched {
  Fiber* fiber;
  const uint32_t* address;
  uint32_t before;
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Fiber*> runnable, held;  // who can go on; held: of the slow warp
  std::vector<Watched> watched;
  Context scheduler;
  Actions pending;  // copies under way
  Meeting warps[32], warpgroups[8];
  std::map<uint32_t, Barrier> barriers;
  std::map<int, NamedBarrier> named;
  Products products[8];
  uint64_t state = 1;
  // What runs beside the threads gets on at one of so many steps of theirs, and when none can go
  // on. At 0 that is the only time: whoever does not wait finds nothing there.
  uint64_t patience = 8;
  bool copies_last = false;  // a copy happens only when no product can
  int order = 0;             // of copies: any, 1: the oldest first, 2: the newest first
  int idle = 0;              // how often those who wait for a while have been sent on in vain
  // It goes on rarely while others can: who does not wait for it has long gone ahead.
  unsigned slow = ~0u;
  uint64_t steps = 0;
  uint32_t fences = 0;                 // of proxies, by all threads
  unsigned index = 0, slot = 0;        // in the grid; among those that run at the same time
  size_t left = 0;                     // threads that have not ended
  bool stuck = false;                  // nobody could go on at the end of its turn
  std::vector<unsigned char> memory;   // shared memory,
  std::vector<uint32_t> memory_holds;  // and what it holds, while another block has its turn

  uint64_t random(uint64_t below);
  bool advance();  // lets one thing that runs beside the threads happen; whether there was one
  std::string places() const;  // where the warps are
};

extern Block* block;
extern size_t shared_size;
extern bool truncating;  // how tensor cores add (instructions.cpp)

inline Fiber& self() { return static_cast<Fiber&>(*current); }
[[noreturn]] void fail(const std::string& what);
void sleep(const char* where);  // until somebody wakes it, whom it has told
void wake(Fiber& fiber);
void wake(Parked& parked);
void take_turns();  // lets others go on
// An arrival, or bytes that have landed; the phase ends when neither is missing.
void progress(uint32_t address, int arrivals, long bytes);

// ------------------------------------------------------------------------ what shared memory holds
// For each byte: nothing yet; what the async proxy has written, or everybody may read; or what a
// thread has written, with the fences there had been by then.  A fence of its own counts after
// that, or one of whoever lets the async proxy read: it has waited for the writer meanwhile, or
// the memory would be found unwritten in another order of turns.
enum : uint32_t { kNothing = 0, kAnyone = 1 };
extern bool checking;  // not under AddressSanitizer, which takes the place of the reports
uint32_t writing(const Fiber& fiber);
void fill(uint32_t address, int bytes, uint32_t with);
void check_filled(const char* who, uint32_t address, int bytes);
void check_fenced(const char* who, uint32_t address, int bytes);
unsigned char* shared_at(uint32_t address, int bytes, int alignment = 1);

// Lends registers to the tensor cores until the open group of products has been waited for.
void lend(const void* registers, size_t bytes);

// `count` threads, 32 or 128, meet; `act` sees all their arguments, in the order of their lanes.
template <typename Argument, typename Act>
void meet(int count, const char* what, Argument& argument, Act act) {
  const int thread = current->tid.x, first = thread / count * count;
  Meeting& meeting = (count == 32 ? block->warps : block->warpgroups)[thread / count];
  if (meeting.came == 0) {
    meeting.what = what;
    const bool all_there = block->left == block->fibers.size();
    for (int i = first; !all_there && i < first + count; ++i) {  // who leaves later looks here
      if (block->fibers.at(i)->ended) {
        fail("thread " + std::to_string(i) + " has left, others wait for it at " + what);
      }
    }
  } else if (meeting.what != what && std::strcmp(meeting.what, what) != 0) {
    fail(std::string("threads of one warp are at ") + meeting.what + " and at " + what);
  }
  meeting.arguments[thread % count] = &argument;
  if (++meeting.came == count) {
    meeting.came = 0;
    act(reinterpret_cast<Argument**>(meeting.arguments));
    wake(meeting.parked);
  } else {
    meeting.parked.push_back(&self());
    sleep(what);
  }
  if (block->random(4) == 0) take_turns();
}

}  // namespace machine
