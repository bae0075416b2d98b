"""Whose turn it is in the emulator, and how it goes from one thread to another."""

import subprocess

import numpy as np
import pytest

from validation import emulator

pytestmark = pytest.mark.emulator

# The order in which threads end; and how far the last warp is when the first one has ended.
TURNS = """
#include "ptx/atomic.cuh"

struct Params {
  uint32 *drawn, *done, *order, *last;
};

extern "C" __global__ void turns(const __grid_constant__ Params params) {
  for (int i = 0; i < 20; ++i) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) params.done[threadIdx.x / 32] = i + 1;
  }
  const uint32 mine = atom_add_u32(params.drawn, 1);
  params.order[mine] = threadIdx.x;
  if (mine == 0) *params.last = min(min(params.done[0], params.done[1]), params.done[2]);
}
"""


def test_turns_are_drawn_by_the_seed(tmp_path):
    """In some schedules a warp goes on rarely, and bugs show that are no bugs where all keep up."""
    (tmp_path / "turns.cu").write_text(TURNS)
    path = emulator.build("probe-turns", tmp_path / "turns.cu", (), ("turns",))
    orders, behind = {}, []
    for seed in [*range(20), *range(5)]:
        drawn, done, order, last = (np.zeros(n, np.uint32) for n in (1, 3, 96, 1))
        arrays = drawn, done, order, last
        params = np.array([tuple(x.ctypes.data for x in arrays)], "u8, u8, u8, u8")
        emulator.launch(path, "turns", 1, 96, 0, params, seed)
        assert sorted(order) == [*range(96)]
        assert orders.setdefault(seed, order.tobytes()) == order.tobytes()
        behind.append(20 - last[0])
    assert len(set(orders.values())) == 20
    assert sum(n > 15 for n in behind[:20]) >= 4
    assert sum(n < 10 for n in behind[:20]) >= 4


# Two fibers and a main program take turns; what they hold in registers meanwhile is still there.
CHANGES = """
#include <cstdio>
#include "context.hpp"
using machine::begin_at;
using machine::change;
alignas(64) char stacks[2][1 << 16];
machine::Context all[3];

template <int kMine>
void run() {
  volatile double one = 1.5;
  double x[4] = {one, one * 2, one * 3, one * 4};
  long y[6] = {kMine, 2, 3, 4, 5, 6};
  for (int turn = 0; turn < 3; ++turn) {
    for (double& each : x) each *= 2;
    for (long& each : y) each += turn + 1;
    std::printf("%d ", kMine * 10 + turn);
    change(all[kMine], all[(kMine + 1) % 3]);
  }
  for (double each : x) std::printf("%g ", each);
  for (long each : y) std::printf("%ld ", each);
  while (true) change(all[kMine], all[(kMine + 1) % 3]);
}

int main() {
  begin_at(all[0], stacks[0], sizeof stacks[0], run<0>);
  begin_at(all[1], stacks[1], sizeof stacks[1], run<1>);
  for (int turn = 0; turn < 4; ++turn) change(all[2], all[0]);
}
"""


def test_threads_change_as_those_of_the_c_library(tmp_path):
    (tmp_path / "changes.cpp").write_text(CHANGES)
    for define in ("FA_OWN", "FA_UCONTEXT"):
        program = tmp_path / define
        command = [emulator.compiler(), f"-D{define}", "-std=c++17", "-O2", f"-I{emulator.FOLDER}"]
        subprocess.run([*command, str(tmp_path / "changes.cpp"), "-o", str(program)], check=True)
        done = subprocess.run(
            [str(program)], capture_output=True, text=True, check=True, timeout=60
        )
        ends = [f"12 24 36 48 {mine + 6} 8 9 10 11 12" for mine in (0, 1)]
        assert done.stdout.split() == f"0 10 1 11 2 12 {ends[0]} {ends[1]}".split()
