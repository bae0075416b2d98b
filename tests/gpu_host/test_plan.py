"""Plans: what they write into parameter structs, with a launcher that notes what it gets."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from fa_cupy.gpu import plan as module
from fa_cupy.gpu.plan import MARK, Plan, Step, Workspace, offset_of, workspace_of
from tests.support.noting_launcher import WORKSPACE, NotingLauncher

INNER = np.dtype([("q", np.uint64), ("k", np.uint64), ("size", np.int32)], align=True)
JOB = np.dtype([("out_map", np.uint64, (16,)), ("out", np.uint64)])
STRUCT = np.dtype(
    [("common", INNER), ("aligned", np.int32), ("job", JOB, (3,))]
    + [(name, np.uint64) for name in ("sums", "counter", "mark")],
    align=True,
)
VARIANT = SimpleNamespace(dtype="float16")
GEOMETRY = (4,), (2,), (1,)


def step(grid=1, **more):
    return Step(VARIANT, grid, np.zeros(1, STRUCT), **more)


def run(plan, *pointers, **more):
    assert plan.run(pointers, **more)
    return plan._launcher.launched[-1][1][0]


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
    found = run(Plan([step(addresses=addresses)], ("out", "q", "k"), NotingLauncher()), 16, 32, 48)
    assert found["common"].tolist() == (32, 48, 0)
    assert found["job"]["out"].tolist() == [0, 16, 0]


def test_shifts_move_addresses_but_null():
    shifts = {"q": -8, "k": 5, "sums": 3}
    own = step(addresses={"common.q": "q", "common.k": "k", "sums": "sums"}, shifts=shifts)
    plan = Plan([own], ("q", "k"), NotingLauncher(), Workspace({"sums": 256}, 512))
    found = run(plan, 100, 0)
    assert found["common"].tolist()[:2] == (92, 0)
    assert found["sums"] == WORKSPACE + 256 + 3


def test_alignment_is_that_of_the_addresses_named():
    plan = Plan([step(addresses={}, aligned=("q", "k"))], ("q", "k", "out"), NotingLauncher())
    assert run(plan, 32, 16, 1)["aligned"] == 1
    assert run(plan, 32, 8, 16)["aligned"] == 0
    assert run(plan, 24, 16, 16)["aligned"] == 0
    assert run(plan, 0, 16, 16)["aligned"] == 1


def test_a_workspace_is_taken_once_a_call_or_given():
    space = workspace_of({"counter": 16, "sums": 300, "end": 1})
    assert space == ({"counter": 0, "sums": 256, "end": 768}, 769)
    addresses = {"sums": "sums", "counter": "counter", "mark": MARK}
    steps = [step(addresses=addresses), step(2, addresses=addresses)]
    plan = Plan(steps, (), NotingLauncher(), space)
    assert plan.workspace_bytes == 769
    marks = set()
    for given, base in ((0, WORKSPACE), (4096, 4096), (0, WORKSPACE)):
        assert plan.run((), given)
        (first, (one,)), (second, (two,)) = plan._launcher.launched[-2:]
        assert (first.grid, second.grid) == (1, 2)
        assert one == two
        assert (one["counter"], one["sums"]) == (base, base + 256)
        marks.add(int(one["mark"]))
    assert plan._launcher.taken == [769, 769]
    assert len(marks) == 3
    assert 0 not in marks


def test_maps_are_made_once_for_an_address():
    maps = {"job.0.out_map": ("q", GEOMETRY), "job.2.out_map": ("k", GEOMETRY)}
    plan = Plan([step(addresses={"common.q": "q"}, maps=maps)], ("q", "k"), NotingLauncher())
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

    launcher = NotingLauncher(refused={160})
    plan = Plan([step(addresses={}, maps=maps)], ("q", "k"), launcher, fallback=fallback)
    for _ in range(2):
        assert plan.run((16, address))
        assert plan.run((16, 32))
    assert [own.grid for own, _ in launcher.launched] == [7, 1, 7, 1]
    assert launcher.launched[0][1]["common"]["k"] == address
    maps = launcher.launched[-1][1]["job"]["out_map"][0, :2]
    assert maps.tolist() == [[16] * 16, [32] * 16]
    assert [plan.other] == made


def test_an_address_without_a_map_launches_nothing_without_a_fallback():
    maps = {"job.0.out_map": ("q", GEOMETRY)}
    launcher = NotingLauncher(refused={160})
    plan = Plan([step(addresses={}), step(addresses={}, maps=maps)], ("q",), launcher)
    assert not plan.run((160,))
    assert launcher.launched == []


def test_structs_in_use_are_not_shared():
    inner = []

    class Reentrant(NotingLauncher):
        def kernel(self, own):
            launch = super().kernel(own)

            def run(arguments, _):
                if arguments.values["common"]["q"] == 1:  # as another thread might
                    plan.run((2,))
                inner.append(int(arguments.values["common"]["q"][0]))
                launch(arguments, None)

            return run

    plan = Plan([step(addresses={"common.q": "q"})], ("q",), Reentrant())
    plan.run((1,))
    assert inner == [2, 1]


def test_few_maps_are_kept(monkeypatch):
    monkeypatch.setattr(module, "_MOST_MAPS", 4)
    plan = Plan(
        [step(addresses={}, maps={"job.0.out_map": ("q", GEOMETRY)})], ("q",), NotingLauncher()
    )
    for i in range(10):
        assert run(plan, 16 * i)["job"]["out_map"][0, 0] == 16 * i
    (launch,) = plan._launches
    assert all(len(own.known) <= 4 for own in launch.maps)


def test_marks_are_unique_and_not_zero():
    with ThreadPoolExecutor(8) as pool:
        marks = list(pool.map(lambda _: next(module._marks), range(20000)))
    assert len(set(marks)) == len(marks)
    assert min(marks) > 0
    assert max(marks) < 2**64


def test_the_same_addresses_are_written_once():
    maps = {"job.0.out_map": ("q", GEOMETRY)}
    own = step(addresses={"common.q": "q", "sums": "sums"}, maps=maps, aligned=("q",))
    plan = Plan([own], ("q",), NotingLauncher(), Workspace({"sums": 0}, 8))
    first = run(plan, 16)
    ((structs,), (launch,)) = plan._pool, plan._launches
    launch.runs = None  # writing again would fail
    assert run(plan, 16) == first
    with pytest.raises(TypeError):
        plan.run((32,))
    assert structs.pointers is None  # and is not used again
    assert plan._pool == []


def test_structs_that_were_not_written_to_the_end_are_not_used_again():
    maps = {"job.0.out_map": ("q", GEOMETRY), "job.1.out_map": ("k", GEOMETRY)}
    launcher = NotingLauncher(refused={160})
    plan = Plan([step(addresses={"common.k": "k"}, maps=maps)], ("q", "k"), launcher)
    assert plan.run((16, 32))
    assert not plan.run((48, 160))
    found = run(plan, 16, 32)
    assert found["job"]["out_map"][:2].tolist() == [[16] * 16, [32] * 16]
    assert found["common"]["k"] == 32


def test_the_workspace_is_given_back_before_the_fallback_takes_its_own():
    class Memory:
        held = 0
        ptr = WORKSPACE

        def __init__(self, size):
            Memory.held += 1
            assert Memory.held == 1

        def __del__(self):
            Memory.held -= 1

    launcher = NotingLauncher()
    launcher.workspace = Memory
    space = Workspace({"sums": 0}, 8)
    plain = step(addresses={"sums": "sums"})
    mapped = plain._replace(maps={"job.0.out_map": ("q", GEOMETRY)})
    plan = Plan(
        [mapped], ("q",), launcher, space, fallback=lambda: Plan([plain], ("q",), launcher, space)
    )
    assert plan.run((24,))
    assert Memory.held == 0
