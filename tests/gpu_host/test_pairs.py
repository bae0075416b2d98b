"""Lists of pairs, which calls read them, and what their plans hand to launches: without a GPU."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

import fa_cupy
from fa_cupy import BitMask
from fa_cupy.core import attention_problem
from fa_cupy.gpu.kernels.attention.attention_params import POINTERS, Traits
from fa_cupy.gpu.kernels.attention.pairs import fwd_pairs, pair_rows
from fa_cupy.gpu.kernels.attention.pairs.pair_rows import PairBias, PairCounts
from fa_cupy.gpu.masks import pair_lists
from tests.core.test_checks import NO_OPTIONS
from tests.support import cupy_stand_in
from tests.support.cupy_stand_in import CAPTURE, owned
from tests.support.noting_launcher import WORKSPACE, NotingLauncher
from tests.support.pair_calls import graph

HALF = np.dtype(np.float16)
NAMES = pair_rows.BY_QUERY_ARRAYS
NO_PIECE = 2**32 - 1


# -------------------------------------------------------------------------------------------- lists
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 300), st.integers(1, 300)),
    density=st.sampled_from([0.0, 0.002, 0.05, 0.5]),
    piece_pairs=st.sampled_from([1, 5, 64]),
    seed=st.integers(0, 2**32),
)
def test_lists_have_the_pairs_of_both_sides(shape, density, piece_pairs, seed):
    """Of sparse, other and full blocks, matrix by matrix."""
    rng = np.random.default_rng(seed)
    dense = graph(rng, *shape, density=density, hubs=1)
    dense[0, :128, :128] |= rng.random() < 0.3
    found = pair_lists.lists_of(BitMask.from_dense(dense), piece_pairs)
    pairs = np.argwhere(dense)
    assert found.counts.pairs == len(pairs)
    for side, other, sizes in ((1, 2, found.by_query), (2, 1, found.by_key)):
        order = np.lexsort((pairs[:, other], pairs[:, side], pairs[:, 0]))
        np.testing.assert_array_equal(sizes.columns, pairs[order, other])
        rows = pairs[order, 0] * dense.shape[side] + pairs[order, side]
        ends = np.searchsorted(rows, np.arange(shape[0] * dense.shape[side] + 1))
        np.testing.assert_array_equal(sizes.begin, ends)
        if side == 2:
            np.testing.assert_array_equal(sizes.places, order)
        check_pieces(sizes, shape[0], dense.shape[side], piece_pairs)


def check_pieces(found, matrices, rows, piece_pairs):
    """Of each long row all pieces, in order; as much room for each matrix."""
    lengths = np.diff(found.begin).reshape(matrices, rows)
    wanted = [
        [(row, i) for row in range(rows) if counts[row] > piece_pairs
         for i in range(-(-counts[row] // piece_pairs))]
        for counts in lengths
    ]  # fmt: skip
    pieces = found.pieces.reshape(matrices, -1, 2)
    assert pieces.shape[1] == max(map(len, wanted))
    for own, want in zip(pieces.tolist(), wanted, strict=True):
        assert [tuple(x) for x in own[: len(want)]] == want
        assert all(row == NO_PIECE for row, _ in own[len(want) :])


def test_lists_are_made_once_and_shared_by_slices():
    dense = graph(np.random.default_rng(0), 2, 200, 200)
    mask = BitMask.from_dense(dense)
    assert pair_lists.lists_of(mask) is pair_lists.lists_of(mask[0])


def test_no_words_are_made_of_a_graph(monkeypatch):
    """Neither to choose nor to list its pairs."""
    rng = np.random.default_rng(1)
    src, dst = rng.integers(0, 5000, (2, 20_000))
    mask = BitMask.from_edges(src, dst, 5000)
    monkeypatch.setattr(pair_lists.entries, "to_words", None)
    monkeypatch.setattr(type(mask._store), "with_words", None)
    counts = pair_lists.chosen(mask, HALF)
    assert counts.pairs == mask.nnz
    assert sum(x.nbytes for x in pair_lists.lists_of(mask).by_query) < 4 * 20_000 + 8 * 5001 + 1


# ------------------------------------------------------------------------------------------- choice
def mask_of(pairs, blocks=4):
    """A mask with so many pairs in each of so many blocks, which are one row of them."""
    dense = np.zeros((128 * 128, blocks), bool)
    dense[:pairs] = True  # column by column
    return BitMask.from_dense(dense.reshape(128, 128, blocks).transpose(1, 2, 0).reshape(128, -1))


@pytest.mark.parametrize(
    ("dtype", "most"),
    [(np.float16, 128), (ml_dtypes.bfloat16, 128), (np.float32, 512)],
)
def test_masks_of_few_pairs_are_computed_one_by_one(dtype, most):
    dtype = np.dtype(dtype)
    assert pair_lists.MOST_PAIRS[dtype.name] == most
    assert pair_lists.chosen(mask_of(most - 1), dtype) == PairCounts(4 * (most - 1), 0, 0)
    assert pair_lists.chosen(mask_of(most), dtype) is None
    assert pair_lists.chosen(mask_of(1), np.dtype(np.float64)) is None
    assert pair_lists.chosen(mask_of(0), dtype) is None
    assert pair_lists.chosen(mask_of(128 * 128), dtype) is None


def test_blocks_with_words_among_many_of_few_pairs():
    """The average counts: one block may be full."""
    rng = np.random.default_rng(2)
    dense = rng.random((1280, 1280)) < 0.002
    dense[:128, :128] = True
    dense[128:256, :128] = rng.random((128, 128)) < 0.1
    mask = BitMask.from_dense(dense)
    assert len(mask._store.host().full) == len(mask._store.host().partial) == 1
    assert pair_lists.chosen(mask, HALF) is None  # 164 and more for each block
    assert pair_lists.chosen(mask, np.dtype(np.float32)).pairs == dense.sum()


def problem_of(shape=(2, 4, 300, 64), dtype=HALF, k_len=None, mask=None, **options):
    q, k = np.zeros(shape, dtype), np.zeros((*shape[:-2], k_len or shape[-2], shape[-1]), dtype)
    if mask is None:
        mask = BitMask.from_dense(np.eye(shape[-2], k.shape[-2], dtype=bool))
    return attention_problem.attention_problem(q, k, k, None, mask, **NO_OPTIONS | options)


def test_calls_that_are_not_served():
    serves = pair_rows.serves
    assert serves(problem_of(), "sm_90a")
    assert serves(problem_of(dtype=np.float32, softcap=2.0), "sm_80")
    assert serves(problem_of((300, 1)), "sm_80")
    assert not serves(problem_of(), None)
    assert not serves(problem_of(dtype=np.float64), "sm_90a")
    assert not serves(problem_of((2, 10, 257)), "sm_90a")
    assert not serves(problem_of((2, 10, 0)), "sm_90a")
    assert not serves(problem_of((*[2] * 7, 10, 8)), "sm_90a")
    assert not serves(problem_of((2, 0, 8)), "sm_90a")
    whole = np.zeros((2, 10, 8), HALF)
    plain = attention_problem.attention_problem(whole, whole, whole, None, None, **NO_OPTIONS)
    assert not serves(plain, "sm_90a")


def launched(call):
    """The kernels of a call."""
    before = len(CAPTURE.log)
    call()
    return [name for kind, name, *_ in CAPTURE.log[before:] if kind == "launch"]


@pytest.fixture
def cupy():
    with cupy_stand_in.on_a_device() as cupy:
        yield cupy


def edges(seed, nodes=600, count=2000):
    src, dst = np.random.default_rng(seed).integers(0, nodes, (2, count))
    return BitMask.from_edges(src, dst, nodes)


@pytest.mark.parametrize("dtype", [HALF, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("how", ["plain", "out", "odd rows", "lse"])
def test_calls_with_a_graph_read_its_pairs(cupy, dtype, how):
    mask = edges(0)
    q = owned(np.zeros((2, 600, 64), dtype))
    options = {}
    if how == "out":
        options["out"] = owned(np.zeros((2, 600, 64), dtype))
    if how == "odd rows":
        q = owned(np.zeros((2, 600, 7), dtype))
    if how == "lse":
        options["return_lse"] = True
    for _ in range(2):
        assert launched(lambda: fa_cupy.attention(q, q, q, mask=mask, **options)) == [
            "attention_fwd_pairs"
        ]
    assert not mask._store.device_masks
    assert not mask._store.device_tables


def test_masks_of_one_shape_are_told_apart(cupy):
    """A plan is not that of a mask of another kind."""
    q = owned(np.zeros((2, 600, 64), HALF))
    few, hubs = edges(1), hub(by_key=False)
    many = BitMask.from_dense(np.random.default_rng(0).random((600, 600)) < 0.1)
    wanted = [
        (few, ["attention_fwd_pairs"]),
        (hubs, ["attention_fwd_pairs"] * 2),  # the second adds up pieces
        (many, ["attention_fwd_sm90"]),
    ]
    for _ in range(2):
        for mask, names in wanted:
            assert launched(lambda mask=mask: fa_cupy.attention(q, q, q, mask=mask)) == names


def test_arrays_of_bool_and_words_on_a_device_are_computed_by_blocks(cupy):
    """What is not on the CPU is not looked at, for that would wait for the device."""
    q = owned(np.zeros((2, 600, 64), HALF))
    eye = np.eye(600, dtype=bool)
    dense = owned(eye)
    assert "attention_fwd_pairs" not in launched(lambda: fa_cupy.attention(q, q, q, mask=dense))
    on_device = BitMask.from_dense(dense)
    names = launched(lambda: fa_cupy.attention(q, q, q, mask=on_device))
    assert "attention_fwd_pairs" not in names
    on_device.get()  # whose lists come to the CPU, which changes no later call
    again = launched(lambda: fa_cupy.attention(q, q, q, mask=on_device))
    assert "attention_fwd_pairs" not in again


GRADIENTS = ["attention_bwd_dq_pairs", "attention_bwd_dkdv_pairs"]


def gradients_of(mask, *, dtype=HALF, heads=(2, 2), dim=64, need=None, **options):
    """The kernels of a call of gradients."""
    q = owned(np.zeros((heads[0], 600, dim), dtype))
    k = owned(np.zeros((heads[1], 600, dim), dtype))
    if heads[0] != heads[1]:  # heads are grouped in arrays of four axes
        q, k = q[None], k[None]
    lse = owned(np.zeros(q.shape[:-1], np.float32))
    return launched(
        lambda: fa_cupy.attention_backward(q, q, k, k, q, lse, mask=mask, need=need, **options)
    )


@pytest.mark.parametrize("dtype", [HALF, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("dim", [64, 7])
def test_gradients_with_a_graph_read_its_pairs(cupy, dtype, dim):
    mask = edges(3)
    for _ in range(2):
        names = gradients_of(mask, dtype=dtype, dim=dim)
        assert [x for x in names if x.startswith("attention")] == GRADIENTS
    assert not mask._store.device_masks
    assert not mask._store.device_tables


def test_gradients_of_heads_that_share_keys(cupy):
    """They have to share the mask as well."""
    assert gradients_of(edges(4), heads=(4, 2)) == GRADIENTS
    several = BitMask.from_dense(np.stack([edges(i).to_dense() for i in range(4)]))
    assert gradients_of(several, heads=(4, 4)) == GRADIENTS
    assert "attention_bwd_sm90" in gradients_of(several[None], heads=(4, 2))


def test_gradients_of_a_bias_and_of_sinks_are_computed_by_blocks(cupy):
    mask, bias = edges(5), owned(np.zeros((600, 600), np.float32))
    assert gradients_of(mask, bias=bias, need=("q", "k", "v")) == GRADIENTS
    assert "attention_bwd_dbias_sm80" in gradients_of(mask, bias=bias)
    sinks = owned(np.zeros((2, 1), np.float32))
    assert "attention_bwd_sm90" in gradients_of(mask, sinks=sinks)


def test_gradients_of_hubs_add_up_pieces(cupy):
    """Of a query, and of a key."""
    assert gradients_of(hub(by_key=False)) == [GRADIENTS[0], *GRADIENTS]
    assert gradients_of(hub(by_key=True)) == [*GRADIENTS, GRADIENTS[1]]


def hub(by_key):
    ends = np.arange(600), np.full(600, 3)
    return BitMask.from_edges(*(ends if not by_key else ends[::-1]), 600)


def csr_on(cupy, matrix):
    parts = {name: cupy.asarray(getattr(matrix, name)) for name in ("data", "indices", "indptr")}
    found = SimpleNamespace(**parts, shape=matrix.shape, format="csr")
    found.tocsr = lambda: found
    return found


@pytest.mark.parametrize("batched", [False, True])
def test_a_graph_on_a_device_is_listed_without_words(batched):
    """Its elements come to the CPU, and its mask belongs to the device."""
    with cupy_stand_in.in_place_of_cupy() as cupy:
        matrices = [edges(i).to_csr().astype(np.float32) for i in range(2)]
        given = [csr_on(cupy, x) for x in matrices]
        mask = BitMask.from_csr(given if batched else given[0])
        assert mask._store.device == 0
        assert not mask._store.on_device_only
        want = BitMask.from_csr(matrices if batched else matrices[0])
        assert mask.get().equals(want)
        assert pair_lists.chosen(mask, HALF) == pair_lists.chosen(want, HALF)
        dense = sparse.csr_array(np.random.default_rng(0).random((300, 300)) < 0.2)
        there = BitMask.from_csr(csr_on(cupy, dense.astype(np.float32)))
        assert there._store.on_device_only
        assert pair_lists.chosen(there, HALF) is None


# -------------------------------------------------------------------------------------------- plans
def plan_of(launcher, problem, counts, bias=None):
    strides = [problem.dtype.itemsize]
    for n in problem.out_shape[:0:-1]:
        strides.insert(0, strides[0] * n)
    out = attention_problem.out_view(problem, problem.out_shape, strides)
    return fwd_pairs.make_plan(Traits(problem, out), launcher, counts, bias)


def test_rows_and_pieces_reach_the_launches():
    launcher = NotingLauncher()
    plan = plan_of(launcher, problem_of(), PairCounts(1000, 3, 0, 100))
    assert plan.names == (*POINTERS, *NAMES)
    assert plan.workspace_bytes == 4 * 8 * 3 * (64 + 4)
    places = [0x100 * i for i in range(1, len(plan.names) + 1)]
    assert plan.run(tuple(places))
    rows, merging = launcher.launched
    assert [values["merging"][0] for _, values in launcher.launched] == [0, 1]
    assert (rows[0].grid, merging[0].grid) == (6 + 600, 6)
    for _, values in launcher.launched:
        p = values[0]
        assert p["entries"] == 8
        assert p["partials"] == WORKSPACE
        assert [p["list"][x] for x in ("rows", "most_pieces", "piece_pairs")] == [300, 3, 100]
        told = [p["list"][x] for x in ("begin", "columns", "pieces", "matrix_of_entry")]
        assert told == places[len(POINTERS) :]
        assert p["common"]["q"] == places[0]
        assert p["common"]["lse"] == places[5]
        assert p["pair_bias"] == 0
        assert p["aligned"] == 1


def test_no_piece_is_one_launch_without_workspace():
    plan = plan_of(NotingLauncher(), problem_of(), PairCounts(1000, 0, 5))
    assert len(plan.steps) == 1
    assert plan.workspace_bytes == 0


def test_odd_rows_are_not_said_to_be_aligned():
    launcher = NotingLauncher()
    plan = plan_of(launcher, problem_of((2, 30, 20)), PairCounts(30, 0, 0))
    plan.run(tuple(range(16, 16 * (len(plan.names) + 1), 16)))
    assert launcher.launched[0][1]["aligned"][0] == 0


def test_a_number_for_each_pair_has_an_address_and_steps():
    launcher = NotingLauncher()
    plan = plan_of(launcher, problem_of(), PairCounts(1000, 0, 0), PairBias((0, 1000)))
    assert plan.names[-1] == "pair_bias"
    plan.run(tuple(range(16, 16 * (len(plan.names) + 1), 16)))
    p = launcher.launched[0][1][0]
    assert p["pair_bias"] == 16 * len(plan.names)
    assert p["bias_axes"]["size"].tolist() == [1, 1, 1, 1, 2, 4]
    assert p["bias_axes"]["stride"].tolist() == [0, 0, 0, 0, 0, 1000]


@pytest.mark.parametrize("dim", [1, 32, 33, 64, 100, 128, 129, 256])
def test_the_smallest_row_serves(dim):
    row = pair_rows.row_serving(fwd_pairs.VARIANTS, "float16", dim)
    assert row.dtype == "float16"
    assert row.dim == min(d for d in (32, 64, 128, 256) if d >= dim)


def test_matrices_from_scipy_stay_what_they_are():
    """As a check of `to_csr` beside the lists."""
    matrix = sparse.random_array((700, 900), density=0.003, rng=1).tocsr()
    mask = BitMask.from_csr(matrix)
    found = pair_lists.lists_of(mask).by_query
    np.testing.assert_array_equal(found.columns, mask.to_csr().indices)
    np.testing.assert_array_equal(found.begin, mask.to_csr().indptr)
