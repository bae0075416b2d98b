// dQ while it is added up, in float32: pieces of 64 queries and 64 columns, for each batch entry
// and tile of queries its pieces, rows before columns.
//
// A piece lies as a warpgroup holds it in its accumulators of m64n64 (ptx/wgmma.cuh): for each 8
// columns the four floats of every thread.  Threads then write 16 bytes next to each other, and a
// piece is one bulk copy.
#pragma once
#include "ptx/types.cuh"

constexpr int kPieceFloats = 64 * 64;
constexpr int kPieceStep = 128 * 4;  // from 8 columns to the next

// Where the four floats of a thread lie for the columns [8 * j, 8 * j + 8).
FA_DEVICE int piece_offset(int j, int thread) { return j * kPieceStep + thread * 4; }
