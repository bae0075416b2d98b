// wgmma: one warpgroup multiplies a 64 x 16 tile A by a 16 x N tile B and adds the product to the
// float32 tile D, asynchronously.  PTX ISA 9.7.15 "Asynchronous Warpgroup Level Matrix
// Instructions".
//
// D, in the threads of the four warps, with g = lane / 4 and t = lane % 4:
//   d[v][2 * i + j] is row 16 * warp + g + 8 * i, column 8 * v + 2 * t + j
// A in registers, as for mma.sync: a[0] (g, 2t..2t+1), a[1] (g+8, same), a[2] (g, 2t+8..2t+9),
// a[3] (g+8, same).  A and B in shared memory are named by descriptors.
//
// D, and A in registers, belong to the tensor cores from wgmma_fence to wgmma_wait_group.
#pragma once
#include "ptx/types.cuh"

// Before the first wgmma, and whenever threads have touched D or A's registers.
FA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
FA_DEVICE void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
// Waits until at most kPending of the latest groups are under way.
template <int kPending>
FA_DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// A matrix in shared memory, in the layout of TMA's 128-byte swizzle: blocks of 64 columns, each
// with rows of 128 bytes, 8 rows an atom of 1,024 bytes.  PTX ISA 9.7.15.5.1.2 "Matrix Descriptor":
// bits 0-13 address / 16, 16-29 leading byte offset / 16, 32-45 stride byte offset / 16, 62-63 the
// swizzle (1: 128 bytes).
//
// The stride leads from one atom of 8 rows to the next, which need not follow it.  The leading
// offset leads from one block of 64 columns to the next where the columns are the M or N axis
// ("MN-major"), and is not used where they are the K axis ("K-major"), as 16 columns never leave a
// block.
FA_DEVICE uint64 wgmma_descriptor(uint32 shared_address, uint32 leading_bytes,
                                  uint32 stride_bytes = 1024) {
  return (uint64(1) << 62) | (uint64(stride_bytes >> 4) << 32) |
         (uint64(leading_bytes >> 4) << 16) | uint64((shared_address & 0x3ffff) >> 4);
}
// The descriptor of what lies so many bytes behind.  An address does not leave its 14 bits, so that
// the sum is one of 32 bits, beside an upper half that is a constant; compilers that see that too
// add 64 bits all the same.
FA_DEVICE uint64 wgmma_at(uint64 descriptor, uint32 bytes) {
  const uint32 low = static_cast<uint32>(descriptor) + bytes / 16;
  uint64 sum;
  asm("mov.b64 %0, {%1, %2};\n" : "=l"(sum) : "r"(low), "r"(static_cast<uint32>(descriptor >> 32)));
  return sum;
}

// Register lists: the text "%0,%1,..." and the operands, for N / 2 registers.
#define FA_D(d, v) "+f"(d[v][0]), "+f"(d[v][1]), "+f"(d[v][2]), "+f"(d[v][3])
#define FA_TEXT_16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define FA_LIST_16(d) FA_D(d, 0), FA_D(d, 1)
#define FA_TEXT_32 FA_TEXT_16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define FA_LIST_32(d) FA_LIST_16(d), FA_D(d, 2), FA_D(d, 3)
#define FA_TEXT_64 FA_TEXT_32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FA_LIST_64(d) FA_LIST_32(d), FA_D(d, 4), FA_D(d, 5), FA_D(d, 6), FA_D(d, 7)
#define FA_TEXT_80 FA_TEXT_64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define FA_LIST_80(d) FA_LIST_64(d), FA_D(d, 8), FA_D(d, 9)
#define FA_TEXT_96 FA_TEXT_80 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define FA_LIST_96(d) FA_LIST_80(d), FA_D(d, 10), FA_D(d, 11)
#define FA_TEXT_112 FA_TEXT_96 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define FA_LIST_112(d) FA_LIST_96(d), FA_D(d, 12), FA_D(d, 13)
#define FA_TEXT_128 FA_TEXT_112 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define FA_LIST_128(d) FA_LIST_112(d), FA_D(d, 14), FA_D(d, 15)
#define FA_TEXT_144 FA_TEXT_128 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define FA_LIST_144(d) FA_LIST_128(d), FA_D(d, 16), FA_D(d, 17)
#define FA_TEXT_160 FA_TEXT_144 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define FA_LIST_160(d) FA_LIST_144(d), FA_D(d, 18), FA_D(d, 19)
#define FA_TEXT_176 FA_TEXT_160 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define FA_LIST_176(d) FA_LIST_160(d), FA_D(d, 20), FA_D(d, 21)
#define FA_TEXT_192 FA_TEXT_176 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define FA_LIST_192(d) FA_LIST_176(d), FA_D(d, 22), FA_D(d, 23)
#define FA_TEXT_224 \
  FA_TEXT_192 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define FA_LIST_224(d) FA_LIST_192(d), FA_D(d, 24), FA_D(d, 25), FA_D(d, 26), FA_D(d, 27)
#define FA_TEXT_256 \
  FA_TEXT_224 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define FA_LIST_256(d) FA_LIST_224(d), FA_D(d, 28), FA_D(d, 29), FA_D(d, 30), FA_D(d, 31)

// One N: the numbers of the four operands after D, as text.
#define FA_WGMMA_SS(n, type, o0, o1, o2, o3, o4)                                                \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " o2                                       \
               ", 0;\n"                                                                         \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FA_TEXT_##n \
               "}, " o0 ", " o1 ", add, 1, 1, " o3 ", " o4 ";\n}\n"                             \
               : FA_LIST_##n(d)                                                                 \
               : "l"(a), "l"(b), "r"(add), "n"(int(kMajorA)), "n"(int(kMajorB)))
#define FA_WGMMA_RS(n, type, o0, o1, o2, o3, o4, o5, o6)                                        \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " o5                                       \
               ", 0;\n"                                                                         \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FA_TEXT_##n \
               "}, {" o0 "," o1 "," o2 "," o3 "}, " o4 ", add, 1, 1, " o6 ";\n}\n"              \
               : FA_LIST_##n(d)                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(int(kMajor)))
#define FA_WGMMA(form, n, ...)                 \
  if constexpr (kN == n) {                     \
    if constexpr (kBf16) {                     \
      FA_WGMMA_##form(n, "bf16", __VA_ARGS__); \
    } else {                                   \
      FA_WGMMA_##form(n, "f16", __VA_ARGS__);  \
    }                                          \
  }

constexpr bool wgmma_has(int n) {
  return n == 16 || n == 32 || n == 64 || n == 80 || n == 96 || n == 112 || n == 128 || n == 144 ||
         n == 160 || n == 176 || n == 192 || n == 224 || n == 256;
}

// How a matrix lies in shared memory.  K-major: as rows of K columns, 64 of A or N of B.  MN-major:
// as K rows of 64 or N columns; 16-bit types can (PTX ISA 9.7.15.5.2 "wgmma.mma_async", imm-trans).
enum Major : int { kKMajor = 0, kMnMajor = 1 };

// D (+)= A B: A (64 x 16) and B (16 x N) in shared memory.
template <bool kBf16, int kN, Major kMajorA = kKMajor, Major kMajorB = kKMajor>
FA_DEVICE void wgmma_m64k16_ss(float (*d)[4], uint64 a, uint64 b, int add) {
  static_assert(wgmma_has(kN), "one of the sizes below");
  FA_WGMMA(SS, 16, "%8", "%9", "%10", "%11", "%12")
  FA_WGMMA(SS, 32, "%16", "%17", "%18", "%19", "%20")
  FA_WGMMA(SS, 64, "%32", "%33", "%34", "%35", "%36")
  FA_WGMMA(SS, 80, "%40", "%41", "%42", "%43", "%44")
  FA_WGMMA(SS, 96, "%48", "%49", "%50", "%51", "%52")
  FA_WGMMA(SS, 112, "%56", "%57", "%58", "%59", "%60")
  FA_WGMMA(SS, 128, "%64", "%65", "%66", "%67", "%68")
  FA_WGMMA(SS, 144, "%72", "%73", "%74", "%75", "%76")
  FA_WGMMA(SS, 160, "%80", "%81", "%82", "%83", "%84")
  FA_WGMMA(SS, 176, "%88", "%89", "%90", "%91", "%92")
  FA_WGMMA(SS, 192, "%96", "%97", "%98", "%99", "%100")
  FA_WGMMA(SS, 224, "%112", "%113", "%114", "%115", "%116")
  FA_WGMMA(SS, 256, "%128", "%129", "%130", "%131", "%132")
}

// D (+)= A B: A (64 x 16) in registers, B (16 x N) in shared memory.
template <bool kBf16, int kN, Major kMajor = kMnMajor>
FA_DEVICE void wgmma_m64k16_rs(float (*d)[4], const uint32 (&a)[4], uint64 b, int add) {
  static_assert(wgmma_has(kN), "one of the sizes below");
  FA_WGMMA(RS, 16, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
  FA_WGMMA(RS, 32, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
  FA_WGMMA(RS, 64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
  FA_WGMMA(RS, 80, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
  FA_WGMMA(RS, 96, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
  FA_WGMMA(RS, 112, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
  FA_WGMMA(RS, 128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
  FA_WGMMA(RS, 144, "%72", "%73", "%74", "%75", "%76", "%77", "%78")
  FA_WGMMA(RS, 160, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
  FA_WGMMA(RS, 176, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
  FA_WGMMA(RS, 192, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
  FA_WGMMA(RS, 224, "%112", "%113", "%114", "%115", "%116", "%117", "%118")
  FA_WGMMA(RS, 256, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
}
