// What products of packed sequences leave out: rows of the output that belong to no sequence become
// 0, and rows and states of sequences whose offsets are out of range become NaN, or 0.
//
// A block looks at one sequence of one batch entry; those of the first and the last sequence have
// the rows before and behind, too.
#include "cuda_src/common/linear_params.cuh"

constexpr int kThreads = FA_THREADS;
constexpr int kBytes = FA_BYTES;  // of an element of the output
static_assert(FA_SHARED_BYTES == 0, "the host launches with this");

template <int kBytes>
struct Bits;
template <>
struct Bits<2> {
  using Type = uint16;
  static constexpr Type kNan = FA_BF16 ? 0x7fc0 : 0x7e00;
};
template <>
struct Bits<4> {
  using Type = uint32;
  static constexpr Type kNan = 0x7fc00000;
};
template <>
struct Bits<8> {
  using Type = uint64;
  static constexpr Type kNan = 0x7ff8000000000000;
};
using Output = Bits<kBytes>::Type;
using NumberBits = Bits<(kBytes == 8 ? 8 : 4)>;
using Number = NumberBits::Type;  // of a state

// Rows [begin, end) of the output, if there is one.
FA_DEVICE void fill_rows(const ProductParams& p, Output* out, int64 begin, int64 end, Output bits) {
  if (p.out == nullptr) return;
  for (int64 row = begin + threadIdx.x / 32; row < end; row += kThreads / 32) {
    for (int col = threadIdx.x % 32; col < p.v_dim; col += 32) out[row * p.out_row + col] = bits;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    linear_other_rows(const __grid_constant__ ProductParams params) {
  const ProductWork work = product_work(params, 1);
  const RowSpan span = span_of_entry(params, work.entry);
  const int64 sequence = work.entry - divide(work.entry, params.sequences) * params.sequences;
  const int64 first = first_row(params, span), last = first + rows_of(span);
  Output* out = static_cast<Output*>(params.out) + work.out - first * params.out_row;
  const bool is_first = sequence == 0, is_last = sequence == params.sequences - 1;
  if (params.reverse ? is_last : is_first) fill_rows(params, out, 0, first, 0);
  if (params.reverse ? is_first : is_last) fill_rows(params, out, last, params.length, 0);
  if (!is_invalid(span)) return;
  fill_rows(params, out, first, last, params.zero_invalid ? 0 : Bits<kBytes>::kNan);
  if (params.state == nullptr || !work.writes_state) return;
  const Number bits = params.zero_invalid ? 0 : NumberBits::kNan;
  const int64 elements = static_cast<int64>(params.qk_dim) * params.v_dim;
  Number* state = reinterpret_cast<Number*>(params.state) + work.state;
  for (int64 i = threadIdx.x; i < elements; i += kThreads) {
    const int64 row = divide(i, params.v_dim), col = i - row * params.v_dim;
    state[row * params.state_row + col * params.state_col] = bits;
  }
}
