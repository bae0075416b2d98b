"""The kernels of attention backward: their own source on the CPU, and what fills their structs."""

import dataclasses
import functools
import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy.gpu.driver import compile
from fa_cupy.gpu.kernels.attention import bwd_convert_dq, bwd_sm90
from fa_cupy.gpu.kernels.attention_backward import ARRAYS, make_plan, select
from fa_cupy.gpu.kernels.backward import Launches, Wanted
from fa_cupy.gpu.kernels.registry import GRADIENTS
from fa_cupy.gpu.kernels.score import ScoreMod
from tests.support.every_run import drawn, examples, only, some
from tests.support.kernel_attention import DTYPES, blocks_of, draw
from tests.support.kernel_gradients import (
    case,
    check,
    parts_of,
    rows_sm90,
    score_of,
    solve,
    traits_of,
)
from tests.support.noting_launcher import NotingLauncher
from tests.support.planted import plant
from validation import emulator

DIMS = (64, 96, 128, 192, 256)
TOP, BOTTOM = "top_left", "bottom_right"


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("dim", "dtype"),
    only(itertools.product(DIMS, DTYPES), (64, "float16"), (128, "bfloat16"), (256, "bfloat16")),
)
def test_every_row(dim, dtype):
    check(case(dtype, (2, 2), (150, 200), (dim, dim), batch=1), seed=1)
    causal = {"is_causal": True, "causal_align": BOTTOM}
    narrow = dim - 8, dim - 16
    check(case(dtype, (4, 2), (130, 300), narrow, batch=1, dlse=True, **causal), seed=2)
    window = {"window": (70, 5), "causal_align": TOP}
    check(case(dtype, (1, 1), (200, 190), (dim, dim - 24), layout="blhd", **window), seed=3)


@pytest.mark.emulator
@pytest.mark.parametrize("dim", only(DIMS, 64, 256))
def test_rows_and_keys_that_see_nothing(dim):
    """Queries without keys have no gradient, nor have keys without queries."""
    for lengths, align in (((300, 70), BOTTOM), ((70, 300), TOP)):
        call = case("bfloat16", (2, 1), lengths, (dim, dim), batch=1, is_causal=True,
                    causal_align=align)  # fmt: skip
        dq, dk, dv = check(call, seed=4)
        hidden = 300 - 70
        if align == BOTTOM:
            assert not dq[:, :, :hidden].astype(np.float32).any()
        else:
            assert not dk[:, :, 70:].astype(np.float32).any()
            assert not dv[:, :, 70:].astype(np.float32).any()
    # Bands that leave out whole tiles on both sides.
    for window in ((0, 0), (5, 0)):
        check(case("float16", (1, 1), (290, 290), (dim, dim), batch=1, window=window), seed=5)


@pytest.mark.emulator
@examples(25)
@given(
    dim=drawn(DIMS, 64),
    dtype=drawn(DTYPES, "float16"),
    lengths=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 1), (4, 2)]),
    less=st.tuples(st.sampled_from([0, 8, 24]), st.sampled_from([0, 8, 16])),
    band=st.sampled_from(["none", "causal", (0, 0), (64, 0), (0, 63), (130, 70), (None, 5)]),
    align=st.sampled_from([TOP, BOTTOM]),
    dlse=st.booleans(),
    layout=st.sampled_from([None, "blhd"]),
    seed=st.integers(0, 2**32),
    blocks=st.integers(1, 4),
)
def test_any_call_with_any_schedule(
    dim, dtype, lengths, heads, less, band, align, dlse, layout, seed, blocks
):
    options = {"causal_align": align} if band != "none" else {}
    if band == "causal":
        options["is_causal"] = True
    elif band != "none":
        options["window"] = band
    dims = dim - less[0], dim - less[1]
    call = case(dtype, heads, lengths, dims, dlse=dlse, layout=layout, **options)
    check(call, seed=seed, blocks=blocks, together=blocks)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("dim", "causal"),
    only(itertools.product((64, 128, 256), (False, True)), (128, True), (256, False)),
)
def test_the_schedule_does_not_show(dim, causal):
    """Bit for bit the same, whoever comes first: the order of all sums is fixed."""
    options = {"is_causal": True, "causal_align": BOTTOM} if causal else {}
    call = case("bfloat16", (2, 1), (140, 390), (dim, dim), **options)
    schedules = [(1, 1), (2, 1), (8, 8), (5, 5)] if causal else [(1, 1), (3, 3), (8, 8), (8, 3)]
    found = {
        tuple(x.tobytes() for x in solve(call, seed=seed, blocks=blocks, together=together))
        for seed, (blocks, together) in enumerate(schedules)
    }
    assert len(found) == 1


@pytest.mark.emulator
@pytest.mark.parametrize("dim", only((64, 96, 128), 128))
@pytest.mark.parametrize(
    ("q_len", "options"),
    [
        (200, {}),
        (200, {"is_causal": True}),
        (200, {"window": (500, 500)}),  # all blocks but the first see all queries
        (30, {"window": (100, 0)}),  # most see none
    ],
    ids=str,
)
def test_blocks_on_a_long_entry_wait_for_those_before(dim, q_len, options, monkeypatch):
    """Nobody waits forever, and the bits are those of blocks that do not wait."""
    options = {**options, "causal_align": BOTTOM}
    for heads in ((2, 2), (3, 1)):
        call = case("bfloat16", heads, (q_len, 520), (dim, dim), **options)
        want = [x.tobytes() for x in solve(call)]
        with monkeypatch.context() as patched:
            patched.setattr(bwd_sm90.BwdSm90, "rows_of_l2_group", 128)
            for seed, (blocks, together) in enumerate([(1, 1), (2, 2), (4, 4), (6, 2)]):
                found = solve(call, seed=seed, blocks=blocks, together=together)
                assert [x.tobytes() for x in found] == want


@pytest.mark.long
@pytest.mark.emulator
def test_sums_of_tensor_cores_that_truncate():
    for dim in (64, 128, 256):
        call = case("float16", (1, 1), (130, 260), (dim, dim))
        assert solve(call, truncating=True)[0].tobytes() != solve(call)[0].tobytes()
        check(call, truncating=True)


@pytest.mark.emulator
def test_scores_of_any_size():
    """Weights of 1 and of nothing; keys of zeros behind the last one would weigh 2**200."""
    for dim in (64, 128, 256):
        call = case("bfloat16", (1, 1), (100, 130), (dim, dim), scale=6.0)
        check(call)
        q = np.abs(call.q)
        check(call._replace(q=q, k=-np.abs(call.k)))


# Scores that are more than products times a positive scale.
SCORES = {
    "any scale": ScoreMod(),
    "softcap": ScoreMod(softcap=True),
    "bias of keys": ScoreMod(bias_axes="key", bias_dtype="float32"),
    "bias of queries": ScoreMod(bias_axes="query", bias_dtype="float16"),
    "bias of pairs": ScoreMod(bias_axes="pair", bias_dtype="bfloat16"),
    "softcap and bias of pairs": ScoreMod(True, "pair", "float32"),
    "bias of pairs by registers": ScoreMod(False, "pair", "bfloat16", by_registers=True),
}


def with_scores(call, score, heads, seed=0):
    """The call with such scores; a bias is of all heads, or of each."""
    options = {"softcap": 2.0} if score.softcap else {"scale": -0.2}
    if score.bias_axes:
        (batch, _, q_len, _), k_len = call.q.shape, call.k.shape[2]
        lengths = {"key": (1, k_len), "query": (q_len, 1), "pair": (q_len, k_len)}
        dtype = {**DTYPES, "float32": np.dtype(np.float32)}[score.bias_dtype]
        bias = draw(batch, heads, *lengths[score.bias_axes], dtype=dtype, seed=seed)
        bias[..., ::7, ::7] = -np.inf if score.bias_axes != "query" else 1.0
        options["bias"] = bias
    return call._replace(options={**call.options, **options})


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("dim", "what"),
    only(
        itertools.product(DIMS, SCORES), (64, "bias of keys"), (64, "bias of pairs"),
        (96, "any scale"), (128, "softcap and bias of pairs"),
    ),
)  # fmt: skip
def test_scores(dim, what):
    score = SCORES[what]
    # A row of a bias begins at an even element, or at an odd one.
    for i, (heads, lengths) in enumerate((((4, 2), (150, 200)), ((2, 2), (129, 131)))):
        band = {"is_causal": True, "causal_align": BOTTOM} if i else {}
        dims = dim - 8 * i, dim - 16 * i
        call = case("bfloat16", heads, lengths, dims, batch=2 - i, dlse=True, **band)
        call = with_scores(call, score, heads[0] if i == 0 else 1, seed=i)
        assert score_of(call)._replace(by_registers=score.by_registers) == score
        check(call, seed=i, blocks=3, together=3)
        assert [x.tobytes() for x in solve(call)] == [x.tobytes() for x in solve(call, seed=9)]


@pytest.mark.long
@pytest.mark.emulator
@pytest.mark.parametrize(
    ("dim", "what"),
    only(itertools.product(DIMS, SCORES), (64, "bias of pairs"), (128, "softcap"),
         (256, "bias of keys")),
)  # fmt: skip
def test_scores_under_a_mask(dim, what):
    call = case("float16", (2, 1), (290, 150), (dim, dim), batch=1, window=(200, 20),
                causal_align=TOP)  # fmt: skip
    call = with_scores(call, SCORES[what], 2)
    call.options["mask"] = blocks_of(np.random.default_rng(dim), 2, 290, 150)
    check(call, blocks=2, together=2)


# A padded dim: what stands in a kernel for such scores, and what is put in its place.
SCORE_BUGS = {
    "a slope is left out": ("bwd_sm90", 128, ("s[j][e] = slope_times(found.slope, weight[e]);",
                                              "s[j][e] = weight[e];")),
    "dV of weights times slopes": (
        "bwd_sm90", 64, ("pack2<kBf16>(weight[2 * h], weight[2 * h + 1]);",
                         "pack2<kBf16>(s[j][2 * h], s[j][2 * h + 1]);"),
    ),
    "the bias of another head": ("bwd_sm90", 128, ("(coordinate[2] + head) * p.bias_batch",
                                                   "coordinate[2] * p.bias_batch")),
    "the bias of other queries": ("bwd_sm90", 64, ("first_query(c, q_stage, countdown), f);",
                                                   "first_query(c, q_stage, countdown) + 8, f);")),
    "the bias of other keys": ("bwd_dkdv_sm90", 256, ("_offset[stage], own_key(c),",
                                                      "_offset[stage], own_key(c) + 1,")),
    "a slope is not handed over": ("bwd_dkdv_sm90", 256, ("slope_times(slope[0], s[j][0])",
                                                          "s[j][0]")),
    "dQ without slopes": ("bwd_dq_sm90", 256, ("slope_times(found.slope,", "slope_times(1.0f,")),
}  # fmt: skip


@functools.cache
def solved_with_scores(dim):
    call = case("bfloat16", (2, 1), (200, 150), (dim, dim), batch=1)
    call = with_scores(call, SCORES["softcap and bias of pairs"], 2)
    return call, solve(call)


@pytest.mark.emulator
@pytest.mark.parametrize("bug", some(SCORE_BUGS, lambda bug: SCORE_BUGS[bug][0]))
def test_a_planted_bug_of_scores_is_found(bug, tmp_path):
    kind, dim, change = SCORE_BUGS[bug]
    call, want = solved_with_scores(dim)
    row = planted_row(kind, dim)
    got = solve(call, sources={row.entry: plant(tmp_path, row.source, change)})
    assert any(x.tobytes() != y.tobytes() for x, y in zip(got, want, strict=True))


# setmaxnreg ignored, or products one after the other.
SLOW_NOTES = ("C7508", "C7510", "C7511", "C7512", "C7513", "C7514")
SCORED = [
    row.for_score(score)
    for row, score in itertools.product(GRADIENTS, SCORES.values())
    if row.kernel in ("bwd_sm90", "bwd_dkdv_sm90", "bwd_dq_sm90")
]


def compiled_always(row):
    usual = row.dtype == "bfloat16" and not row.sparse
    wide = usual and row.dim == 256 and row.score.softcap and not row.score.bias_axes
    return wide or (usual and row.dim == 128 and row.score.bias_dtype != "float16")


@pytest.mark.long
@pytest.mark.parametrize(
    "row", only(SCORED, *filter(compiled_always, SCORED)), ids=lambda row: row.name
)
def test_what_scores_take_leaves_products_in_flight(row):
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    found = compile.resource_report(compile.compile_variant(row, "sm_90a").log)
    assert not [note for note in found.notes if any(code in note for code in SLOW_NOTES)]
    # Not in every build is there a register for everything.
    most = 80 if not row.sparse else 256
    assert max(found.spill_stores, found.spill_loads) <= most


# Of a kernel and a padded dim: what is said, then what stands there and what is put in its place.
# Where nothing is said, what comes out differs.
BUGS = {
    "a piece is added before its turn": (
        "bwd_sm90", 128, "",
        ("while (ld_acquire_gpu_u32(params.dq_semaphore + query_tile) != semaphore_value) { }", ""),
    ),
    "a turn is passed on before the sums are written": (
        "bwd_sm90", 128, "",
        ("if (!work.has_no_query) { cp_async_bulk_wait_group<0>();", "if (!work.has_no_query) {"),
    ),
    "a turn is never passed on": (
        "bwd_sm90", 64, "deadlock; .*ld.acquire: warps",
        ("red_release_gpu_add_u32(params.dq_semaphore + query_tile, 1);", ""),
    ),
    "the first piece is added to what lay there": (
        "bwd_sm90", 64, "", ("if (semaphore_value == 0) {", "if (semaphore_value < 0) {"),
    ),
    "dS is overwritten while the other warpgroup reads it": (
        "bwd_sm90", 128, "",
        ("wait(c.shared.ds_empty[pipe.index()], pipe.parity() ^ 1);", ""),
    ),
    "dS is read before the other warpgroup has written it": (
        "bwd_sm90", 128, "wgmma reads .* holds nothing|",
        ("wait(c.shared.ds_full[pipe.index()], pipe.parity());", ""),
    ),
    "dS is not fenced": (
        "bwd_sm90", 64, "wgmma without fence.proxy.async",
        ("fence_proxy_async_shared(); release_per_lane(c.shared.ds_full[pipe.index()]);",
         "release_per_lane(c.shared.ds_full[pipe.index()]);"),
    ),
    "a piece is not fenced": (
        "bwd_sm90", 128, "a bulk copy without fence.proxy.async",
        ("fence_proxy_async_shared(); }; auto release_staging", "}; auto release_staging"),
    ),
    "Q is given back before dK has read it": (
        "bwd_sm90", 128, "wgmma reads .* not yet",
        ("visible_bits, needs_mask); wgmma_wait_group<0>(); // dK release_q(c, tile);",
         "visible_bits, needs_mask); wgmma_wait_group<0>();"),
        ("wgmma_commit_group(); publish_dq(c, tiles); "
         "gemm_dk_from_shared(dk, c, tiles, tile.q);",
         "wgmma_commit_group(); publish_dq(c, tiles); "
         "gemm_dk_from_shared(dk, c, tiles, tile.q); release_q(c, tile);"),
    ),
    "dQ is read before it is done": (
        "bwd_sm90", 64, "a load from registers of a wgmma in flight",
        ("wgmma_wait_group<1>(); // dQ release_ds(c, tiles); advance(",
         "release_ds(c, tiles); advance("),
    ),
    "K is given back before the last dQ": (
        "bwd_sm90", 128, "wgmma reads .* not yet|",
        ("release(shared.k_empty);", ""),
        ("const QueryTile tile = query_tile_at(c, tiles); Rounded",
         "release(shared.k_empty); const QueryTile tile = query_tile_at(c, tiles); Rounded"),
    ),
    "weights are read before they are written": (
        "bwd_dkdv_sm90", 256, "a load reads .* holds nothing|",
        ("wait(c.shared.p_full[pipe.index()], pipe.parity());", ""),
    ),
    "K is given back before dQ has read it": (
        "bwd_dq_sm90", 256, "wgmma reads .* not yet",
        ("wgmma_wait_group<0>(); release_k(c, previous_k_stage(tiles)); }",
         "wgmma_wait_group<0>(); }"),
        ("if constexpr (!kFirst && !kAccumulateFirst) "
         "gemm_dq(dq, ds, c.shared.k[previous_k_stage(tiles)]);",
         "if (!kFirst) gemm_dq(dq, ds, c.shared.k[previous_k_stage(tiles)]), "
         "release_k(c, previous_k_stage(tiles));"),
    ),
    "V is given back before dP is done": (
        "bwd_dq_sm90", 256, "wgmma reads .* not yet",
        ("release(c.shared.v_empty[v_stage]);", ""),
        ("if constexpr (!kFirst && !kAccumulateFirst) gemm_dq(",
         "release(c.shared.v_empty[v_stage]); if constexpr (!kFirst && !kAccumulateFirst) "
         "gemm_dq("),
    ),
}  # fmt: skip


def planted_row(kind, dim):
    return next(row for row in rows_sm90("bfloat16", dim, dim) if row.source.endswith(kind))


@functools.cache
def solved(dim):
    """A call that bugs are planted for, and its gradients."""
    call = case("bfloat16", (2, 1), (200, 420), (dim, dim))
    return call, solve(call)


@pytest.mark.emulator
@pytest.mark.parametrize("bug", some(BUGS, lambda bug: BUGS[bug][0]))
def test_a_planted_bug_is_found(bug, tmp_path):
    kind, dim, message, *changes = BUGS[bug]
    call, want = solved(dim)
    row = planted_row(kind, dim)
    sources = {row.entry: plant(tmp_path, row.source, *changes)}
    for seed in range(60):
        try:
            got = solve(call, seed=seed, blocks=3, together=3, sources=sources)
        except emulator.EmulationError as error:
            if re.search(message, str(error)):
                return
            continue
        if any(x.tobytes() != y.tobytes() for x, y in zip(got, want, strict=True)):
            assert re.search(message, ""), "what comes out differs, and nothing was said"
            return
    pytest.fail("60 seeds did not show it")


def test_what_tensor_maps_walk():
    def mapped(*arrays, **options):
        return traits_of(*arrays, **options).wanted.mapped

    x = np.zeros((2, 4, 40, 64), np.float16)
    few = np.zeros((2, 2, 40, 64), np.float16)
    assert mapped(x, x, x)
    assert mapped(x, few, few, is_causal=True)
    assert mapped(x, x, x, softcap=2.0)
    assert mapped(x, x, x, scale=-1.0)
    assert mapped(x, x, x, np.zeros((4, 40, 41), np.float16)[..., 1:])  # which has no map
    assert not mapped(x[..., :63], x[..., :63], x)
    assert not mapped(x, few, x)  # the sum over heads is of k alone
    assert not mapped(x, x[..., :0, :], x[..., :0, :])
    odd = np.zeros((2, 40, 4, 68), np.float16)[..., :64].swapaxes(1, 2)
    assert not mapped(odd, x, x)


def test_a_workspace_holds_what_kernels_write():
    q, k = np.zeros((3, 4, 130, 64), np.float16), np.zeros((3, 2, 300, 64), np.float16)
    rows = rows_sm90("float16", 64, 64)
    plan, space = make_plan(traits_of(q, k, k), NotingLauncher(multiprocessors=1000))
    assert [step.variant for step in plan.steps] == list(rows)
    first, main, last, redo = plan.steps
    parts = parts_of(space)
    tiles = 3 * 4 * 3, 3 * 2 * 5  # of 64 queries, of 64 keys
    for name, size in {
        "lse_delta": 3 * 4 * 256 * 8,
        "row_statistics": 3 * 4 * 256 * 8,
        "dq_accum": 3 * 4 * 2 * 2 * 64 * 64 * 4,
        "dq_semaphore": 3 * 4 * 2 * 4,
        "tile_counters": 16,
        "nonfinite_flags": 4 * (1 + sum(tiles)),
        "task_counters": 8,
    }.items():
        assert parts[name] >= size, name
    # From the flags on all is cleared.
    assert first.addresses["counters"] == "nonfinite_flags"
    cleared = space.nbytes - space.places["nonfinite_flags"]
    assert first.params["counter_words"] * 4 == cleared
    counters = ("nonfinite_flags", "dq_semaphore", "tile_counters", "task_counters")
    assert sum(parts[name] for name in counters) == cleared
    p = main.params[0]
    assert (p["group"], p["entries"], p["k_tiles"], main.grid) == (2, 6, 3, 18)
    assert last.grid == 3 * 4 * 2 * 2
    assert redo.grid == tiles[0] + 2 * tiles[1]
    assert [step.persistent for step in plan.steps] == [False, True, False, True]
    plan, _ = make_plan(traits_of(q, k, k), NotingLauncher(multiprocessors=5))
    assert [step.grid for step in plan.steps] == [first.grid, 5, last.grid, 5]


def test_copies_lie_behind_what_is_cleared():
    x = np.zeros((2, 130, 64), np.float16)
    plan, space = make_plan(traits_of(x, x, x), NotingLauncher(), {"q": x.nbytes, "dk": 1})
    assert list(space.places)[-2:] == ["q", "dk"]
    assert parts_of(space)["q"] >= x.nbytes
    cleared = space.places["nonfinite_flags"] + plan.steps[0].params["counter_words"][0] * 4
    assert space.places["task_counters"] + 8 <= cleared <= space.places["q"]
    assert plan.names == tuple(name for name in ARRAYS if name not in ("q", "dk"))


def test_select():
    assert select(Wanted("float32", 136), "sm_80") == ()
    assert select(Wanted("float32", 257), "sm_90a") == ()
    assert select(Wanted("float16", 257), "sm_90a") == ()
    assert select(Wanted("float16", 64, mapped=False, strided=False), "sm_90a") == ()
    for dim in range(8, 264, 8):
        rows = select(Wanted("bfloat16", dim), "sm_90a")
        assert len(rows) == 4
        assert all(row.dim >= dim for row in rows)
        assert rows[1].kernel == ("bwd_sm90" if dim <= 128 else "bwd_dkdv_sm90")
        for score in SCORES.values():
            scored = select(Wanted("bfloat16", dim, score=score), "sm_90a")
            assert [row.kernel for row in scored] == [row.kernel for row in rows]
            assert scored[0] == rows[0]
            assert scored[1].score == scored[3].score == score
            assert scored[2].tile_m == getattr(scored[1], "dq_tile_m", scored[2].tile_m)
        plain = select(Wanted("bfloat16", dim, mapped=False), "sm_90a")
        assert plain == select(Wanted("bfloat16", dim), "sm_80")
        assert plain[1].kernel == "bwd_dkdv_sm80"


def test_pieces_are_rounded_as_they_are_added_up():
    for row in bwd_sm90.VARIANTS:
        assert bwd_convert_dq.row_after(row).tile_m == row.dq_tile_m
        tall = dataclasses.replace(row, tile_m=160)
        assert bwd_convert_dq.row_after(tall).tile_m == tall.dq_tile_m > row.dq_tile_m


def test_blocks_at_work_on_a_long_entry_are_more_of_one_entry():
    """What they share is then in the L2 cache. No group is larger than that of short entries."""
    rows = {row.dim: row for row in bwd_sm90.VARIANTS if not row.sparse and row.dtype == "float16"}

    def entries(dim, tokens, heads=(64, 64), **options):
        q, k = (np.empty((1, n, tokens, dim), np.float16) for n in heads)
        traits = traits_of(q, k, k, **options)
        step = rows[dim].step(traits, Launches(traits, [rows[dim]], 132))
        return int(step.params["entries_per_l2_group"][0])

    for dim in rows:
        assert [entries(dim, tokens) for tokens in (100, 4096, 8192)] == [16] * 3
        assert [entries(dim, 2**i) for i in range(14, 19)] == [8, 4, 2, 2, 2]
    assert entries(128, 2**13, (64, 8)) == entries(128, 2**16, (8, 8)) == 2
    offsets = np.array([0, 2**18])
    assert entries(128, 2**18, q_offsets=offsets, k_offsets=offsets) == rows[128].l2_groups[2]
