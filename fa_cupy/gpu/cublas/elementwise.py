"""Elementwise steps on tiles, compiled by CuPy on first use.

Kernels over a whole tile find their row by a 32-bit division: tiles are below 2**32 elements.
"""

from __future__ import annotations

import cupy

_INFINITY = "#define FA_INFINITY __longlong_as_double(0x7ff0000000000000LL)"

mask_scores = cupy.ElementwiseKernel(
    "bool keep",
    "T score",
    "if (!keep) score = -FA_INFINITY",
    "fa_cupy_mask_scores",
    preamble=_INFINITY,
)

# A table says of each block of 128 x 128 where its words are, -1 if it is full, -2 if it is empty;
# words are in the fragment order of `fa_cupy.layouts`. Of a table of one entry all have the blocks.
mask_blocks = cupy.ElementwiseKernel(
    "raw int32 table, raw uint32 words, uint32 entries, uint32 q_tiles, uint32 k_tiles, "
    "uint32 m, uint32 n, uint32 row, uint32 column",
    "T score",
    """
    const unsigned int index = i;
    const unsigned int x = column + index % n, y = row + index / n % m;
    const unsigned int entry = entries > 1 ? index / n / m : 0;
    const long long place = table[(entry * q_tiles + y / 128) * k_tiles + x / 128];
    bool keep = place == -1;
    if (place >= 0) {
        const unsigned int lane = y % 8 * 4 + x % 8 / 2;
        const unsigned int word = words[512 * place + y % 128 / 16 * 64 + 2 * lane + y % 16 / 8];
        keep = word >> (x % 128 / 8 * 2 + x % 2) & 1;
    }
    if (!keep) score = -FA_INFINITY;
    """,
    "fa_cupy_mask_blocks",
    preamble=_INFINITY,
)

scale = cupy.ElementwiseKernel(
    "float64 factor", "T score", "score = score * factor", "fa_cupy_scale"
)

band_scores = cupy.ElementwiseKernel(
    "uint32 m, uint32 n, int64 least, int64 most",
    "T score",
    """
    const unsigned int index = i;
    const long long column = index % n, row = index / n % m;
    if (column - row < least || column - row > most)
        score = -FA_INFINITY;
    """,
    "fa_cupy_band_scores",
    preamble=_INFINITY,
)

weigh = cupy.ElementwiseKernel(
    "raw T shift, uint32 n",
    "T score",
    "score = exp(score - shift[(unsigned int)i / n])",
    "fa_cupy_weigh",
)

# Of gradients, weights and the gradients of their scores, in one pass over both tiles.
weigh_pairs = cupy.ElementwiseKernel(
    "raw T shift, raw T total, bool divides, raw T base, uint32 n",
    "T score, T dscore",
    """
    const unsigned int row = (unsigned int)i / n;
    score = exp(score - shift[row]);
    if (divides) score /= total[row];
    dscore = score * (dscore - base[row]);
    """,
    "fa_cupy_weigh_pairs",
)

# Whether some row is far, as `tiled.softmax.is_far` has it.
mark_far = cupy.ElementwiseKernel(
    "T lse, float64 far",
    "raw int32 found",
    "if (isfinite(lse) && fabs((double)lse) >= far) found[1] = 1",
    "fa_cupy_mark_far",
)

# Rounded to the 10 bits of mantissa that TF32 keeps: the tensor cores would cut the rest off, which
# makes every product a little too small. A NaN of ones would overflow into the sign: it stays.
round_to_tf32 = cupy.ElementwiseKernel(
    "",
    "float32 weight",
    "if (isfinite(weight)) "
    "weight = __uint_as_float((__float_as_uint(weight) + 0x1000u) & ~0x1fffu)",
    "fa_cupy_round_to_tf32",
)

scale_rows = cupy.ElementwiseKernel(
    "raw T decay, uint32 n", "T acc", "acc *= decay[(unsigned int)i / n]", "fa_cupy_scale_rows"
)

close_rows = cupy.ElementwiseKernel(
    "T top",
    "T total, T lse",
    "lse = top + log(total); if (total == T(0)) total = 1",
    "fa_cupy_close_rows",
)

divide_rows = cupy.ElementwiseKernel(
    "raw T total, uint32 n",
    "T acc, raw int32 spoiled",
    """
    acc /= total[(unsigned int)i / n];
    if (!isfinite(acc)) spoiled[0] = 1;
    """,
    "fa_cupy_divide_rows",
)

from_bfloat16 = cupy.ElementwiseKernel(
    "uint16 bits",
    "float32 value",
    "value = __uint_as_float((unsigned int)bits << 16)",
    "fa_cupy_from_bfloat16",
)

to_bfloat16 = cupy.ElementwiseKernel(  # to the nearest, ties to even
    "float32 value",
    "uint16 bits",
    """
    const unsigned int word = __float_as_uint(value);
    bits = isnan(value) ? 0x7fff : (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    """,
    "fa_cupy_to_bfloat16",
)
