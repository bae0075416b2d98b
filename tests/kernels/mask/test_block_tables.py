"""Tables of masks: by the kernels that make them, run on the CPU, and as validation makes them."""

import numpy as np
import pytest

from fa_cupy import BitMask, layouts
from fa_cupy.core import attention_problem
from fa_cupy.gpu.kernels.mask.mask_table import MASK_TABLE
from fa_cupy.masks.blocks import BlockLists
from tests.support import cupy_stand_in
from tests.support.every_run import only, some
from tests.support.kernel_attention import blocks_of
from tests.support.planted import plant
from validation import emulator
from validation.emulator.launcher import EmulatorLauncher
from validation.emulator.masks import WHOLE, tables_of

pytestmark = pytest.mark.emulator
SIZES = [(1, 1), (300, 70), (128, 128), (129, 4300), (4200, 260)]


def problem_of(mask, batch=None):
    q_len, k_len = mask.shape[-2:]
    batch = mask.shape[:-2] if batch is None else batch
    q, k = (np.zeros((*batch, n, 8), np.float16) for n in (q_len, k_len))
    return attention_problem.attention_problem(q, k, k, None, mask)


def random_mask(seed, *shape):
    rng = np.random.default_rng(seed)
    mask = blocks_of(rng, *shape)
    mask[..., : shape[-2] // 3, shape[-1] // 2 :] = False
    return mask


def dense_of(arrays, kind, matrix, rows, cols):
    """A matrix as a table has it, blocks of 128."""
    places = arrays[f"mask_{kind}_block_index"].reshape(-1, rows, cols)[matrix]
    words = arrays[f"mask_{kind}_words"].reshape(-1, *layouts.ORDERS["fragment"])
    dense = np.zeros((rows, cols, 128, 128), bool)
    dense[places == WHOLE] = True
    if (places >= 0).any():
        dense[places >= 0] = layouts.unpack(words[places[places >= 0]])
    return dense.swapaxes(1, 2).reshape(rows * 128, cols * 128)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tables_say_what_the_mask_does(size):
    dense = random_mask(1, 2, *size)
    for mask in (dense, BitMask.from_dense(dense)[::-1]):
        arrays = tables_of(problem_of(mask), mask).arrays
        q_blocks, k_blocks = (-(-n // 128) for n in size)
        for entry, matrix in enumerate(arrays["mask_matrix_of_entry"]):
            want = mask[entry].to_dense() if isinstance(mask, BitMask) else mask[entry]
            got = dense_of(arrays, "by_query", matrix, q_blocks, k_blocks)
            assert (got[: size[0], : size[1]] == want).all()
            turned = dense_of(arrays, "by_key", matrix, k_blocks, q_blocks)
            assert (got == turned.T).all()


def test_the_struct_is_that_of_cuda():
    assert MASK_TABLE.itemsize == 48


@pytest.fixture(scope="module")
def cupy():
    with cupy_stand_in.in_place_of_cupy() as cupy:
        yield cupy


@pytest.fixture
def host(cupy, monkeypatch):
    from fa_cupy.gpu.masks import block_tables

    launched_by(block_tables, monkeypatch, EmulatorLauncher())
    return block_tables


def launched_by(host, monkeypatch, launcher):
    monkeypatch.setattr(host.workspace, "launcher", lambda device: launcher)


def made_by(host, mask):
    """The tables of all matrices of a mask, from its lists."""
    from fa_cupy.gpu.masks.device_mask import DeviceMask

    lists = BlockLists(*map(cupy_stand_in.owned, mask._store.with_words()))
    ends = [lists.partial_begin[:-1], lists.partial_begin[1:]]
    more = [lists.full_begin[:-1], lists.full_begin[1:]]
    device = DeviceMask(*ends, lists.partial, lists.words, *more, lists.full, 0)
    found = host.make(device, mask._grid, 0)
    return {f"mask_{name}": cupy_stand_in.bare(x) for name, x in found._asdict().items()}


def check_tables(host, mask):
    found = made_by(host, mask)
    want = tables_of(problem_of(mask), mask).arrays
    for name in found:
        like = want[name].reshape(-1)
        assert (found[name][: like.size] == like).all(), name


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels_make_the_tables(host, size):
    check_tables(host, BitMask.from_dense(random_mask(2, 3, *size)))


@pytest.mark.parametrize("seed", only(range(20), 0, 1, 2))
def test_any_mask(host, seed):
    sizes = np.random.default_rng(seed).integers(1, 600, 2)
    mask = BitMask.from_dense(random_mask(seed, 2, *sizes))
    check_tables(host, mask.T if seed % 2 else mask)


# Of a kernel: what stands there, and what is put in its place.
BUGS = {
    "a search ends behind what it looks for": (
        "mask/block_tables", ("if (list[middle] < block)", "if (list[middle] <= block)"),
    ),
    "what is before a block is not counted": (
        "mask/block_tables", ("prefix_count += words_index != kEmptyBlock;", ""),
    ),
    "the turned table is not turned": (
        "mask/block_tables", ("const int words_index = shared.block_index[lane][warp];",
                        "const int words_index = shared.block_index[warp][lane];"),
    ),
    "it is read before it is written": ("mask/block_tables", ("__syncthreads();", "")),
    "full blocks are those in part": (
        "mask/block_tables", ("words_index = kFullBlock;", "words_index = static_cast<int>(full);"),
    ),
    "rows and columns of a word are mixed up": (
        "mask/transpose_words", ("transposed[word_position(own + 2 * col_pair, row_pair)]",
                      "transposed[word_position(own + 2 * row_pair, col_pair)]"),
    ),
    "words of the lower half": ("mask/transpose_words", ("row % 16 / 8", "0")),
}  # fmt: skip


@pytest.mark.parametrize("bug", some(BUGS, lambda bug: BUGS[bug][0]))
def test_a_planted_bug_is_found(host, bug, tmp_path, monkeypatch):
    source, *changes = BUGS[bug]
    planted = {source.replace("/", "_"): plant(tmp_path, source, *changes)}
    launched_by(host, monkeypatch, EmulatorLauncher(sources=planted))
    mask = BitMask.from_dense(random_mask(4, 2, 300, 700))
    with pytest.raises((AssertionError, emulator.EmulationError)):
        check_tables(host, mask)
