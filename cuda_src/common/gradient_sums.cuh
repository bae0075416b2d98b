// dQ while it is added up, in float32: transposed, in pieces of 64 columns and some queries, for
// each batch entry and tile of queries its pieces, queries before columns.
//
// A piece lies as a warpgroup holds it in its accumulators of m64nN (ptx/wgmma.cuh): for each 8
// queries the four floats of every thread.  Threads then write 16 bytes next to each other, and a
// piece is one bulk copy.
#pragma once
#include "ptx/types.cuh"

constexpr int kPieceStep = 128 * 4;  // floats from 8 queries to the next

// Floats of a piece of so many queries.
FA_DEVICE constexpr int piece_floats(int queries) { return queries / 8 * kPieceStep; }
// Where the four floats of a thread lie for the queries [8 * j, 8 * j + 8).
FA_DEVICE int piece_offset(int j, int thread) { return j * kPieceStep + thread * 4; }
