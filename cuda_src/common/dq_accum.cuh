// dQ while it is added up, in float32: transposed, in tiles of 64 columns and some queries, for
// each batch entry and tile of queries its tiles of dQ, queries before columns.
//
// A tile of dQ lies as a warpgroup holds it in its accumulators of m64nN (ptx/wgmma.cuh): for each
// 8 queries the four floats of every thread.  Threads then write 16 bytes next to each other, and a
// tile is one bulk copy.
#pragma once
#include "ptx/types.cuh"

constexpr int kDqTileStep = 128 * 4;  // floats from 8 queries to the next

// Floats of a tile of so many queries.
FA_DEVICE constexpr int dq_tile_floats(int queries) { return queries / 8 * kDqTileStep; }
// Where the four floats of a thread lie for the queries [8 * j, 8 * j + 8).
FA_DEVICE int dq_tile_offset(int j, int thread) { return j * kDqTileStep + thread * 4; }
