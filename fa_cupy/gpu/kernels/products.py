"""Plans of causal products: which kernels compute one or some of them, and their launches.

The arrays of product i have the names ``i.q``, ``i.k``, ``i.v``, ``i.out``, ``i.initial`` and
``i.state`` in a plan, which takes their addresses in that order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from fa_cupy.core.linear_problem import Product
from fa_cupy.gpu.kernels.linear import params, sm90_params
from fa_cupy.gpu.kernels.linear.choice import Choice
from fa_cupy.gpu.kernels.linear.cost_model import choose
from fa_cupy.gpu.kernels.linear.packed import other_rows, sequence_spans
from fa_cupy.gpu.kernels.linear.params import POINTERS, Job, Traits
from fa_cupy.gpu.kernels.linear.variant import ProductSm90Variant, ProductVariant
from fa_cupy.gpu.plan import Launcher, Plan, Step, workspace_of

#: Of a product, as `POINTERS` but for the workspace.
ARRAYS = POINTERS[:-1]
# What plans of so many products call their arrays: gradients are up to three, and a state.
_NAMES = tuple([[f"{i}.{name}" for i in range(jobs) for name in ARRAYS] for jobs in range(5)])


def make_plan(jobs: Sequence[Job], launcher: Launcher, algorithm: str = "auto") -> Plan | None:
    """Return the plan of some products; None where no kernel serves them.

    Parameters
    ----------
    jobs : sequence of Job
        One; or two or three of as many batch entries and rows each and of one dtype, which have a
        plan where one launch computes them all, or where none of them is for kernels for SM90.
    launcher : Launcher
    algorithm : str, optional
        Of `fa_cupy.core.linear_problem.ALGORITHMS`.
    """
    traits = [params.traits_of(job) for job in jobs]
    mapped = all(map(sm90_params.takes, traits))
    choice = None
    if mapped or len(jobs) == 1:
        choice = choice_of([job.problem for job in jobs], launcher, algorithm, mapped)
    if choice is not None:
        return plan_by(choice, traits, launcher, algorithm)
    return _plan_apart(traits, launcher, algorithm) if len(jobs) > 1 else None


def _plan_apart(jobs: Sequence[Traits], launcher: Launcher, algorithm: str) -> Plan | None:
    """Return the plan of products in launches of their own; None where one is for SM90 or none."""
    choices: list[Choice] = []
    for own in jobs:
        choice = choice_of([own.job.problem], launcher, algorithm, sm90_params.takes(own))
        if choice is None or isinstance(choice.row, ProductSm90Variant):
            return None
        choices.append(choice)
    return _unmapped(choices, jobs, _NAMES[len(jobs)], launcher)


def choice_of(
    problems: Sequence[Product], launcher: Launcher, algorithm: str, mapped: bool,
    halved: bool = False,
) -> Choice | None:  # fmt: skip
    """Return how some products are computed in one launch; None where no kernel does that.

    `halved` is as in `fa_cupy.gpu.kernels.linear.cost_model.choose`.
    """
    if launcher.target is None:
        return None
    first = problems[0]
    qk_dim = max([problem.qk_dim for problem in problems])
    v_dim = max([problem.v_dim for problem in problems])
    return choose(
        first.dtype.name, math.prod(first.batch), first.k_len, qk_dim, v_dim, launcher.target,
        launcher.multiprocessors, algorithm, mapped, len(problems), halved=halved,
    )  # fmt: skip


def plan_by(
    choice: Choice, jobs: Sequence[Traits], launcher: Launcher, algorithm: str = "auto"
) -> Plan:
    """Return the plan of some products that are computed as `choice` says."""
    names = _NAMES[len(jobs)]
    if not isinstance(choice.row, ProductSm90Variant):
        return _unmapped([choice] * len(jobs), jobs, names, launcher)

    def fallback() -> Plan:
        choices = [choice_of([own.job.problem], launcher, algorithm, False) for own in jobs]
        return _unmapped([x for x in choices if x is not None], jobs, names, launcher)

    sizes = {} if choice.states is None else _sizes_sm90(choice, jobs)
    steps = steps_sm90(choice, jobs)
    return Plan(list(steps), names, launcher, workspace_of(sizes), fallback)


def _sizes_sm90(choice: Choice, jobs: Sequence[Traits], first: int = 0) -> dict[str, int]:
    """Return the bytes of the states of products in one launch, by name; see `steps_sm90`."""
    return {f"{first + i}.workspace": _states_bytes(choice, own) for i, own in enumerate(jobs)}


def _unmapped(
    choices: Sequence[Choice], jobs: Sequence[Traits], names: Sequence[str], launcher: Launcher
) -> Plan:
    """Return the plan of products, one after the other, by kernels that need no tensor maps."""
    steps: list[Step] = []
    size = 0
    for i, (choice, traits) in enumerate(zip(choices, jobs, strict=True)):
        problem = traits.job.problem
        launches = choice.launches(problem.qk_dim, problem.v_dim)
        # They follow each other, so that all of them can have their states in the same place.
        held = "" if choice.states is None else "workspace"
        steps += steps_alone(choice, launches, traits, i, held)
        if held:
            size = max(size, _states_bytes(choice, traits))
    return Plan(steps, names, launcher, workspace_of({"workspace": size} if size else {}))


def _states_bytes(choice: Choice, traits: Traits) -> int:
    problem = traits.job.problem
    return problem.state_dtype.itemsize * math.prod(
        (*problem.batch, choice.segments, problem.qk_dim, problem.v_dim)
    )


def steps_alone(
    choice: Choice,
    launches: Sequence[tuple[ProductVariant, int, int]],
    traits: Traits,
    number: int,
    workspace: str,
) -> Iterator[Step]:
    """Yield the launches of kernels that compute one product each.

    Parameters
    ----------
    choice : Choice
        How the sequence is split.
    launches : sequence of tuple
        Rows with blocks a segment, and segments, as from `Choice.launches`.
    traits : Traits
    number : int
        Of the product, in the names of its arrays.
    workspace : str
        The name of the memory for states of segments; empty where there is none.
    """
    most = max([tiles * segments for _, tiles, segments in launches])
    filled = params.fill(traits, (choice.segments, choice.segment_rows), most)
    addresses = {name: f"{number}.{name}" for name in ARRAYS}
    if traits.job.sequences is not None:
        addresses["spans"] = traits.job.sequences.spans
    aligned = tuple(addresses[name] for name in ARRAYS[:4]) if filled.aligned else ()
    for offsets, first, blocks, _ in filled.parts:
        pairs = zip(ARRAYS, offsets, strict=False)
        shifts = {addresses[name]: filled.shifts.get(name, 0) + at for name, at in pairs}
        for row, tiles, segments in launches:
            own = filled.params.copy()
            own["first_batch"], own["tiles"] = first, tiles
            yield Step(
                row,
                blocks // most * tiles * segments,
                own,
                addresses | ({"workspace": workspace} if workspace else {}),
                shifts=shifts,
                aligned=aligned,
            )


def packed_plan(
    jobs: Sequence[Job], packing: Product, launcher: Launcher, algorithm: str = "auto",
    mapped: bool = True,
) -> Plan | None:  # fmt: skip
    """Return the plan of products of packed sequences; None where no kernel serves them.

    It takes the addresses of the offsets after those of the arrays.

    Parameters
    ----------
    jobs : sequence of Job
        Each with `Job.sequences`, of as many.
    packing : Product
        Its offsets are theirs, and its lengths those of the queries and keys.
    launcher : Launcher
    algorithm : str, optional
        Of `fa_cupy.core.linear_problem.ALGORITHMS`.
    mapped : bool, optional
        Whether arrays have addresses that tensor maps can be made for.
    """
    steps: list[Step] = []
    sizes: dict[str, int] = {}
    traits = [params.traits_of(job) for job in jobs]
    together = _packed_choice(traits, packing, launcher, algorithm, mapped)
    groups = [(0, traits, together)]
    if together is None and len(jobs) > 1:
        alone = [[own] for own in traits]
        choices = [_packed_choice(own, packing, launcher, algorithm, mapped) for own in alone]
        groups = list(zip(range(len(jobs)), alone, choices, strict=True))
    for first, some, choice in groups:
        if choice is None:
            return None
        if isinstance(choice.row, ProductSm90Variant):
            steps += steps_sm90(choice, some, first)
            sizes |= {} if choice.states is None else _sizes_sm90(choice, some, first)
        else:
            problem = some[0].job.problem
            launches = choice.launches(problem.qk_dim, problem.v_dim)
            held = "" if choice.states is None else "workspace"
            steps += steps_alone(choice, launches, some[0], first, held)
            if held:  # launches follow each other, so that all can have their states there
                sizes[held] = max(sizes.get(held, 0), _states_bytes(choice, some[0]))
    steps += _other_steps(traits)

    def fallback() -> Plan:
        plan = packed_plan(jobs, packing, launcher, algorithm, mapped=False)
        assert plan is not None, "kernels that need no tensor maps serve all of this"
        return plan

    return _with_spans(steps, len(jobs), packing, launcher, sizes, fallback)


def _packed_choice(
    jobs: Sequence[Traits], packing: Product, launcher: Launcher, algorithm: str = "auto",
    mapped: bool = True,
) -> Choice | None:  # fmt: skip
    """Return how products of packed sequences are computed in one launch; see `packed_plan`.

    None where no kernel does that; of one product, where no kernel serves it.
    """
    assert packing.offsets is not None
    problems = [traits.job.problem for traits in jobs]
    first = problems[0]
    if launcher.target is None or first.k_len >= params.MOST_PACKED_ROWS:
        return None
    mapped = mapped and all(map(sm90_params.takes, map(sm90_params.without_sequences, jobs)))
    return choose(
        first.dtype.name, math.prod(first.batch), max(1, first.k_len // packing.offsets.sequences),
        max([problem.qk_dim for problem in problems]), max([problem.v_dim for problem in problems]),
        launcher.target, launcher.multiprocessors, algorithm, mapped, len(jobs), packed=True,
    )  # fmt: skip


def other_rows_plan(jobs: Sequence[Job], packing: Product, launcher: Launcher) -> Plan:
    """Return the plan that writes what products of packed sequences leave out; see `packed_plan`.

    Of a job, no array is read, and no output where its address is 0.
    """
    steps = [*_other_steps([params.traits_of(job) for job in jobs])]
    return _with_spans(steps, len(jobs), packing, launcher, {})


def _other_steps(jobs: Sequence[Traits]) -> Iterator[Step]:
    """Yield the launches that write what products of packed sequences leave out."""
    for i, traits in enumerate(jobs):
        dtype = traits.job.problem.dtype.name
        row = next(row for row in other_rows.VARIANTS if row.dtype == dtype)
        yield from steps_alone(Choice(row, None, 1, 1, 0.0), [(row, 1, 1)], traits, i, "")


def _with_spans(
    steps: list[Step], jobs: int, packing: Product, launcher: Launcher, sizes: dict[str, int],
    fallback: Callable[[], Plan] | None = None,
) -> Plan:  # fmt: skip
    """Return a plan that finds the rows of sequences before its other steps."""
    assert packing.offsets is not None
    spans = dict.fromkeys(
        sequence_spans.SPANS, sequence_spans.SPAN_BYTES * packing.offsets.sequences
    )
    steps = [sequence_spans.spans_step(packing), *steps]
    names = [*_NAMES[jobs], *sequence_spans.OFFSETS]
    return Plan(steps, names, launcher, workspace_of(spans | sizes), fallback)


def steps_sm90(choice: Choice, jobs: Sequence[Traits], first: int = 0) -> Iterator[Step]:
    """Yield the launches of kernels for SM90, each of all products, with what helps them.

    In the names of their arrays, products count from `first` on.
    """
    # The states' rows have as many value columns as the outputs', so one struct serves both.
    sequences = jobs[0].job.sequences
    walked = jobs if sequences is None else [sm90_params.without_sequences(own) for own in jobs]
    filled, geometry, blocks = sm90_params.fill(
        walked, choice.row.tile_n, (choice.segments, choice.segment_rows)
    )
    held: tuple[str, ...] = sm90_params.ADDRESSES
    if choice.states is None:
        held = tuple(name for name in held if name != "workspace")
    numbers = range(len(jobs))
    addresses = {f"job.{i}.{name}": f"{first + i}.{name}" for i in numbers for name in held}
    if sequences is not None:
        addresses["spans"] = sequences.spans
    maps = {
        f"job.{i}.{name}_map": (f"{first + i}.{name}", own)
        for i in numbers
        for name, own in geometry[i].items()
    }
    problem = jobs[0].job.problem
    for row, _, segments in choice.launches(problem.qk_dim, problem.v_dim):
        if isinstance(row, ProductSm90Variant):
            yield Step(row, blocks * segments, filled, addresses, maps)
            continue
        for i, traits in enumerate(jobs, first):  # `state_prefix_sum` takes one product a launch
            problem = traits.job.problem
            launches = choice.launches(problem.qk_dim, problem.v_dim)
            own = [launch for launch in launches if launch[0] is row]
            yield from steps_alone(choice, own, traits, i, f"{i}.workspace")
