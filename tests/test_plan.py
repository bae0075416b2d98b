"""Plans: what they write into parameter structs, with a launcher that notes what it gets."""

from types import SimpleNamespace

import numpy as np
import pytest

from fa_cupy.gpu.plan import MARK, Plan, Step, Workspace, offset_of, workspace_of

INNER = np.dtype([("q", np.uint64), ("k", np.uint64), ("size", np.int32)], align=True)
JOB = np.dtype([("out_map", np.uint64, (16,)), ("out", np.uint64)])
STRUCT = np.dtype(
    [("common", INNER), ("aligned", np.int32), ("job", JOB, (3,))]
    + [(name, np.uint64) for name in ("sums", "counter", "mark")],
    align=True,
)
VARIANT = SimpleNamespace(dtype="float16")
GEOMETRY = (4,), (2,), (1,)


class Launcher:
    """Notes the structs of launches; `refused` addresses have no tensor map."""

    def __init__(self, refused=()):
        self.launched, self.encoded, self.taken, self.refused = [], [], [], refused

    def kernel(self, step):
        return lambda arguments: self.launched.append((step.grid, arguments.values[0].copy()))

    def tensor_map(self, pointer, dtype, *geometry):
        assert (dtype, geometry) == ("float16", GEOMETRY)
        self.encoded.append(pointer)
        return None if pointer in self.refused else np.full(16, pointer, np.uint64).tobytes()

    def workspace(self, size):
        self.taken.append(size)
        return SimpleNamespace(ptr=0x10000)


def step(grid=1, **more):
    return Step(VARIANT, grid, np.zeros(1, STRUCT), **more)


def run(plan, *pointers, **more):
    assert plan.run(pointers, **more)
    return plan._launcher.launched[-1][1]


def test_offsets_are_those_of_the_struct():
    values = np.zeros(1, STRUCT)
    values["job"]["out"][0, 2] = 7
    at = offset_of(STRUCT, "job.2.out")
    assert values.tobytes()[at : at + 8] == (7).to_bytes(8, "little")
    assert offset_of(STRUCT, "common.k") == 8
    with pytest.raises(KeyError):
        offset_of(STRUCT, "common.v")


def test_addresses_are_written_where_fields_are():
    addresses = {"common.k": "k", "common.q": "q", "job.1.out": "out"}
    found = run(Plan([step(addresses=addresses)], ("out", "q", "k"), Launcher()), 16, 32, 48)
    assert found["common"].tolist() == (32, 48, 0)
    assert found["job"]["out"].tolist() == [0, 16, 0]


def test_shifts_move_addresses_but_null():
    shifts = {"q": -8, "k": 5, "sums": 3}
    own = step(addresses={"common.q": "q", "common.k": "k", "sums": "sums"}, shifts=shifts)
    plan = Plan([own], ("q", "k"), Launcher(), Workspace({"sums": 256}, 512))
    found = run(plan, 100, 0)
    assert found["common"].tolist()[:2] == (92, 0)
    assert found["sums"] == 0x10000 + 256 + 3


def test_alignment_is_that_of_the_addresses_named():
    plan = Plan([step(addresses={}, aligned=("q", "k"))], ("q", "k", "out"), Launcher())
    assert run(plan, 32, 16, 1)["aligned"] == 1
    assert run(plan, 32, 8, 16)["aligned"] == 0
    assert run(plan, 24, 16, 16)["aligned"] == 0
    assert run(plan, 0, 16, 16)["aligned"] == 1


def test_a_workspace_is_taken_once_a_call_or_given():
    space = workspace_of({"counter": 16, "sums": 300, "end": 1})
    assert space == ({"counter": 0, "sums": 256, "end": 768}, 1024)
    addresses = {"sums": "sums", "counter": "counter", "mark": MARK}
    steps = [step(addresses=addresses), step(2, addresses=addresses)]
    plan = Plan(steps, (), Launcher(), space)
    assert plan.workspace_bytes == 1024
    marks = set()
    for given, base in ((0, 0x10000), (4096, 4096), (0, 0x10000)):
        assert plan.run((), given)
        (first, one), (second, two) = plan._launcher.launched[-2:]
        assert (first, second) == (1, 2)
        assert one == two
        assert (one["counter"], one["sums"]) == (base, base + 256)
        marks.add(int(one["mark"]))
    assert plan._launcher.taken == [1024, 1024]
    assert len(marks) == 3
    assert 0 not in marks


def test_maps_are_made_once_for_an_address():
    maps = {"job.0.out_map": ("q", GEOMETRY), "job.2.out_map": ("k", GEOMETRY)}
    plan = Plan([step(addresses={"common.q": "q"}, maps=maps)], ("q", "k"), Launcher())
    for q, k in ((16, 32), (16, 32), (48, 32), (16, 64), (16, 32)):
        found = run(plan, q, k)
        assert found["common"]["q"] == q
        assert found["job"]["out_map"].tolist() == [[q] * 16, [0] * 16, [k] * 16]
    assert plan._launcher.encoded == [16, 32, 48, 64]


@pytest.mark.parametrize("address", [24, 160])
def test_an_address_without_a_map_goes_to_the_fallback(address):
    maps = {"job.0.out_map": ("q", GEOMETRY), "job.1.out_map": ("k", GEOMETRY)}
    made = []

    def fallback():
        made.append(Plan([step(7, addresses={"common.k": "k"})], ("q", "k"), launcher))
        return made[-1]

    launcher = Launcher(refused={160})
    plan = Plan([step(addresses={}, maps=maps)], ("q", "k"), launcher, fallback=fallback)
    for _ in range(2):
        assert plan.run((16, address))
        assert plan.run((16, 32))
    assert [grid for grid, _ in launcher.launched] == [7, 1, 7, 1]
    assert launcher.launched[0][1]["common"]["k"] == address
    assert launcher.launched[-1][1]["job"]["out_map"][:2].tolist() == [[16] * 16, [32] * 16]
    assert [plan.other] == made


def test_an_address_without_a_map_launches_nothing_without_a_fallback():
    maps = {"job.0.out_map": ("q", GEOMETRY)}
    launcher = Launcher(refused={160})
    plan = Plan([step(addresses={}), step(addresses={}, maps=maps)], ("q",), launcher)
    assert not plan.run((160,))
    assert launcher.launched == []


def test_structs_in_use_are_not_shared():
    inner = []

    class Reentrant(Launcher):
        def kernel(self, own):
            launch = super().kernel(own)

            def run(arguments):
                if arguments.values["common"]["q"] == 1:  # as another thread might
                    plan.run((2,))
                inner.append(int(arguments.values["common"]["q"][0]))
                launch(arguments)

            return run

    plan = Plan([step(addresses={"common.q": "q"})], ("q",), Reentrant())
    plan.run((1,))
    assert inner == [2, 1]
