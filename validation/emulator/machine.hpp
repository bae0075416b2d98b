// Blocks of a GPU on the CPU: threads are fibers, warps and warpgroups act when all their threads
// have come, copies and products that run beside the threads happen at a random moment before the
// wait that promises them.  One seed decides which fiber runs next and when that moment is.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine.hpp"

constexpr size_t kSharedLimit = 227 * 1024;

namespace machine {

using Ready = std::function<bool()>;
using Action = std::function<void()>;

// Registers that a thread has lent to the tensor cores.
struct Registers {
  uintptr_t low, high;
  uint64_t group;  // of products; in flight until that one has been waited for
  bool touched;    // since the last wgmma_fence
};

// Copies that a thread asked for: the open group, and the closed ones.  A group is the number of
// its copies whose source has not been read, and of those that have not been written.
struct CopyGroup {
  int unread = 0, unwritten = 0;
};
using Group = std::shared_ptr<CopyGroup>;
struct CopyGroups {
  Group open = std::make_shared<CopyGroup>();
  std::deque<Group> closed;

  Group add();
  void commit();
  void wait(const char* where, int pending, int CopyGroup::* left);
};

struct Fiber : Thread {
  ucontext_t context;
  jmp_buf place;
  char* stack;
  void* fake_stack = nullptr;  // AddressSanitizer's
  Ready ready;                 // empty: it can go on, unless it is parked
  const char* where = "running";
  bool started = false, ended = false;
  bool parked = false;              // until somebody wakes it
  bool impatient = false;           // it waits for a while only
  uint32_t fence = 0;               // of proxies, its last: the number in the block
  const uint32_t* asked = nullptr;  // the word that it asked for last, and what that was
  uint32_t answer = 0;
  CopyGroups copies, stores;  // cp.async, TMA
  std::vector<Registers> registers;
  uintptr_t low = ~uintptr_t(0), high = 0;      // bounds of them all
  uint64_t groups = 0, waited = 0, fenced = 0;  // groups of products; wgmma_fences
};

// Threads that meet: the last to come acts for all, and wakes them.
using Parked = std::vector<Fiber*>;
struct Meeting {
  int came = 0;
  const char* what = nullptr;
  std::vector<void*> arguments;
  Parked parked;
};

// What is under way, in the order in which it was asked for; pointers, which move fast when one
// in the middle is taken out.
class Actions {
  std::vector<Action*> actions;

 public:
  Actions() = default;
  Actions(const Actions&) = delete;
  ~Actions() {
    for (Action* action : actions) delete action;
  }
  size_t size() const { return actions.size(); }
  void push_back(Action action) { actions.push_back(new Action(std::move(action))); }
  std::unique_ptr<Action> take(size_t i) {
    std::unique_ptr<Action> taken(actions[i]);
    actions.erase(actions.begin() + static_cast<std::ptrdiff_t>(i));
    return taken;
  }
};

struct Barrier {  // an mbarrier
  int arrivals = 0, missing = 0;
  long bytes = 0;
  uint32_t phase = 0;
};

struct NamedBarrier {
  int threads = 0, came = 0;
  Parked parked;
};

// Products that a warpgroup has asked for, in order, with the number of their group.
using Products = std::deque<std::pair<uint64_t, Action>>;

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Fiber*> runnable, waiting;  // of those that are not parked, by whether they wait
  ucontext_t scheduler;
  jmp_buf place;
  Actions pending;  // copies under way
  Meeting warps[32], warpgroups[8];
  std::map<uint32_t, Barrier> barriers;
  std::map<int, NamedBarrier> named;
  std::map<int, Products> products;
  uint64_t state = 1;
  // What runs beside the threads gets on at one of so many steps of theirs, and when none can go
  // on. At 0 that is the only time: whoever does not wait finds nothing there.
  uint64_t patience = 8;
  bool copies_last = false;  // a copy happens only when no product can
  int order = 0;             // of copies: any, 1: the oldest first, 2: the newest first
  int idle = 0;              // how often those who wait for a while have been sent on in vain
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
void wait_until(const char* where, Ready ready);
void park(const char* where, Parked& among);
void wake(Parked& parked);
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
    meeting.arguments.assign(count, nullptr);
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
    act(reinterpret_cast<Argument**>(meeting.arguments.data()));
    wake(meeting.parked);
  } else {
    park(what, meeting.parked);
  }
  if (block->random(4) == 0) wait_until("running", {});
}

}  // namespace machine
