// What a fiber's code goes on from when another one has run: its stack and the registers that a
// function keeps for its caller.  A change of contexts is a call that returns elsewhere; those of
// the C library ask the kernel for the signal mask, or cost five times as much.
#pragma once
#include <cstddef>

namespace machine {

#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(FA_UCONTEXT)
struct Context {
  void* stack = nullptr;  // its top; the registers lie there
};

extern "C" void fa_change_stacks(void** mine, void* other);

#if defined(__x86_64__)
// System V ABI for AMD64, 3.2.1: rbx, rbp and r12 to r15 belong to the caller.
constexpr size_t kSavedWords = 6;
asm(R"(
  .text
  .p2align 4
  .type fa_change_stacks, @function
fa_change_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size fa_change_stacks, .-fa_change_stacks
)");
#else
// AAPCS64, 6.1: x19 to x28, the frame pointer x29 and the low halves of v8 to v15 belong to the
// caller; x30 is where to return to.
constexpr size_t kSavedWords = 20;
asm(R"(
  .text
  .p2align 4
  .type fa_change_stacks, %function
fa_change_stacks:
  sub sp, sp, #160
  stp d8, d9, [sp, #0]
  stp d10, d11, [sp, #16]
  stp d12, d13, [sp, #32]
  stp d14, d15, [sp, #48]
  stp x19, x20, [sp, #64]
  stp x21, x22, [sp, #80]
  stp x23, x24, [sp, #96]
  stp x25, x26, [sp, #112]
  stp x27, x28, [sp, #128]
  stp x29, x30, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp d8, d9, [sp, #0]
  ldp d10, d11, [sp, #16]
  ldp d12, d13, [sp, #32]
  ldp d14, d15, [sp, #48]
  ldp x19, x20, [sp, #64]
  ldp x21, x22, [sp, #80]
  ldp x23, x24, [sp, #96]
  ldp x25, x26, [sp, #112]
  ldp x27, x28, [sp, #128]
  ldp x29, x30, [sp, #144]
  add sp, sp, #160
  ret
  .size fa_change_stacks, .-fa_change_stacks
  .p2align 4
  .type fa_begin, %function
fa_begin:
  mov x30, xzr
  mov x16, x19
  br x16
  .size fa_begin, .-fa_begin
)");
extern "C" void fa_begin();
#endif

inline void change(Context& mine, Context& other) { fa_change_stacks(&mine.stack, other.stack); }

// A context that begins in `run`, which does not return. It finds a return address of 0, where a
// backtrace ends.
inline void begin_at(Context& context, char* stack, size_t size, void (*run)()) {
  void** top = reinterpret_cast<void**>(stack + size);
#if defined(__x86_64__)
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(run);
  for (size_t i = 0; i < kSavedWords; ++i) *--top = nullptr;
#else
  for (size_t i = 0; i < kSavedWords; ++i) *--top = nullptr;
  top[8] = reinterpret_cast<void*>(run);  // x19
  top[19] = reinterpret_cast<void*>(fa_begin);
#endif
  context.stack = top;
}

#else
}  // namespace machine
#include <ucontext.h>
namespace machine {
using Context = ucontext_t;

inline void change(Context& mine, Context& other) { swapcontext(&mine, &other); }

inline void begin_at(Context& context, char* stack, size_t size, void (*run)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = size;
  context.uc_link = nullptr;
  makecontext(&context, run, 0);
}
#endif

}  // namespace machine
