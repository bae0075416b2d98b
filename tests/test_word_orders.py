"""Both orders of mask words: the builds that compare them in the emulator, and the rest of it."""

import functools
import re
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cupy import BitMask, layouts
from fa_cupy.gpu.driver import compile
from fa_cupy.gpu.kernels.attention import fwd_params, fwd_sm90_params
from fa_cupy.gpu.kernels.attention.fwd_variants import VARIANTS
from tests.kernel_attention import BANDS, DTYPES, blocks_of, check, draw, shuffled
from tests.planted import plant
from tests.test_compile import SLOW_NOTES
from validation import __main__ as validation
from validation import cases, emulated, emulator, peers, sparse_peers, store, word_orders
from validation.emulated.masks import lists_of

FRAGMENT, *OTHERS = (word_orders.row(build) for build in word_orders.BUILDS)
SMALL = cases.MaskedAttention("bf16", 128, "elements", 256, 1, 2)
by_build = pytest.mark.parametrize("row", OTHERS, ids=lambda row: str(row.row_major))


# ------------------------------------------------------------------------------------ the kernel
def results(row, *call, source=None, **options):
    return [x.tobytes() for x in emulated.attention(row, *call, source=source, **options)]


@functools.cache
def hard_call(spoiled=True):
    """Trust in references is lost, so words are read again; NaN stands where nobody may look.

    So all rows are computed again, key by key, if `spoiled`.
    """
    q, k, v = (draw(n, 128, dtype=DTYPES["bfloat16"], seed=n) for n in (150, 384, 384))
    k = (k.astype(np.float32) * np.linspace(0.01, 12, 384)[:, None]).astype(k.dtype)
    mask = np.random.default_rng(0).random((150, 384)) < 0.5
    mask[:, 20] = mask[6:, 17] = False
    if spoiled:
        k[20], v[20], v[17] = np.nan, np.nan, np.inf
    return q, k, v, None, BitMask.from_dense(mask)


@functools.cache
def wanted(band, spoiled=True):
    return results(FRAGMENT, *hard_call(spoiled), **BANDS[band])


@pytest.mark.long
@pytest.mark.emulator
@by_build
@settings(deadline=None, max_examples=5)
@given(
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 300)),
    density=st.sampled_from([0.02, 0.5, 0.95]),
    band=st.sampled_from(BANDS),
    by_tile=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_outputs_do_not_show_the_order_of_words(row, lengths, density, band, by_tile, seed):
    rng = np.random.default_rng(seed)
    q_len, k_len = lengths
    q, k, v = (
        draw(n, 128, dtype=DTYPES["bfloat16"], seed=seed + i)
        for i, n in enumerate((q_len, k_len, k_len))
    )
    mask = blocks_of(rng, q_len, k_len, density=density)
    how = {"seed": seed % 1000, "by_tile": by_tile, "order": shuffled(rng, (), q_len), **band}
    out, lse = check(row, q, k, v, mask, **how)
    want = results(FRAGMENT, q, k, v, None, BitMask.from_dense(mask), **how)
    assert [out.tobytes(), lse.tobytes()] == want


@pytest.mark.long
@pytest.mark.emulator
@by_build
@pytest.mark.parametrize("band", [0, 1, 2])
def test_outputs_of_a_hard_call_are_the_same_too(row, band):
    assert results(row, *hard_call(), **BANDS[band]) == wanted(band)


# What stands in the headers, what is put there instead; which builds it breaks.
BUGS = {
    "rows in another order": ("thread / 32 * 16 + thread % 32 / 4", "thread / 4", (1, 2)),
    "the second row is the next one": ("rows[8 * h].x", "rows[h].x", (1, 2)),
    "columns of another lane": ("first_bit = thread % 4 * 2", "first_bit = 0", (1, 2)),
    "a band takes away other columns": ("2 * pair_fragment(t) & 3", "2 * (15 - t) & 3", (1, 2)),
    "a single element is looked up in the other order": (
        "if constexpr (kRowMajor > 0) return words[row * 4", "if (false) return words[row * 4",
        (1, 2),
    ),
    "words are taken in the other order": (
        "if constexpr (kRowMajor > 0) return take_rows", "if (false) return take_rows", (1, 2),
    ),
    "one word stands for four": ("kLaneWords == 1 ? 0 : t / 4;", "0;", (1,)),
    "bits of a word in the order of fragments": ("? t % 4 * 4 + t / 4 : t", "? t : t", (2,)),
    "bits are gathered on top of one another": ("first_bit - 2 * w", "first_bit", (2,)),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.emulator
@pytest.mark.parametrize(
    ("bug", "build"), [(bug, build) for bug, (*_, builds) in BUGS.items() for build in builds]
)
def test_a_planted_bug_is_found(bug, build, tmp_path):
    row = OTHERS[build - 1]
    source = plant(tmp_path, row.source, BUGS[bug][:2])

    def shows(band, spoiled):
        found = results(row, *hard_call(spoiled), source=source, **BANDS[band])
        return found != wanted(band, spoiled)

    assert any(shows(band, spoiled) for spoiled in (False, True) for band in (0, 1))


# --------------------------------------------------------------------------------- the comparison
def test_loads_follow_from_the_layouts():
    assert word_orders.loads("fragment") == (8, (8,), 2, 0)
    assert word_orders.loads("row_major") == (32, (16, 16), 8, 0)


@pytest.mark.parametrize(
    ("stride", "size", "want"),
    [
        (4, 4, (1, 0)),
        (0, 4, (1, 0)),  # all lanes share a word
        (8, 4, (2, 1)),
        (128, 4, (32, 31)),
        (8, 8, (2, 0)),
        (16, 8, (4, 2)),
        (16, 16, (4, 0)),
        (32, 16, (8, 4)),
        (128, 16, (32, 28)),
    ],
)
def test_bank_conflicts(stride, size, want):
    assert word_orders.cycles(stride * np.arange(32), size) == want


def listing(hides=87):
    """What nvdisasm might print of a kernel that has two copies of what is counted."""
    lines = {}
    for file, functions in word_orders.COUNTED.items():
        text = (compile.ROOT / file).read_text()
        lines |= {name: (file, word_orders.lines_of(text, name)) for name in functions}
    out = ["\t.target\tsm_90a"]
    for caller in (364, 418):
        for name, count in (("extract_words", 7), ("mask_by_bits", hides), ("has_max", 4)):
            file, where = lines[name]
            for i in range(count):
                at = f'"/x/{file}", line {where[2 + i % 3]}'
                out.append(f'\t//## File "/x/ptx/types.cuh", line 1 inlined at {at}')
                out.append(f'\t//## File {at} inlined at "/x/fwd_sm90.cu", line {caller}')
                out.append(f'\t//## File "/x/fwd_sm90.cu", line {caller}')
                out.append(
                    f"        /*{i:04x}*/                   FSEL R1, R1, R2, P0 ;  // |  215  |"
                )
        out.append('\t//## File "/x/fwd_sm90.cu", line 1')
        out.append("        /*8000*/                   EXIT ;")
    return "\n".join(out)


def test_instructions_are_counted_by_the_functions_they_come_from():
    assert word_orders.counted(listing()) == 7 + 87 + 4
    assert word_orders.counted(listing(hides=100)) == 7 + 100 + 4
    assert len(list(word_orders.instructions(listing()))) == 2 * (98 + 1)
    assert word_orders.live(listing()) == 215
    with pytest.raises(ValueError, match="no line of mask_by_bits"):
        word_orders.counted(listing(hides=0))


def test_lines_of_a_function():
    text = (compile.ROOT / "cuda_src/common/block_lists.cuh").read_text()
    lines = word_orders.lines_of(text, "mask_by_bits")
    found = text.splitlines()[lines[0] - 1 : lines[-1]]
    assert "mask_by_bits" in found[0]
    assert found[-1] == "}"
    assert "-FA_INFINITY" in "".join(found)


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: str(row.row_major))
def test_builds_keep_what_the_kernel_promises(row):
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    assert row not in VARIANTS
    made = compile.compile_variant(row, word_orders.TARGET)
    said = compile.resource_report(made.log)
    assert said.registers == 168
    assert not [note for note in said.notes if any(code in note for code in SLOW_NOTES)]


@pytest.mark.long
def test_without_a_gpu_what_needs_none_is_printed(tmp_path, capsys, monkeypatch):
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    monkeypatch.setattr(store, "gpu_available", lambda: False)
    out, program = tmp_path / "out.json", tmp_path / "nvdisasm"
    missing = ["word_orders", "--nvdisasm", str(program), "--out", str(out)]
    assert validation.main(missing) == 0
    shown = capsys.readouterr().out
    assert "instructions are not counted" in shown
    assert re.search(r"^bytes of words +8 +32 +32$", shown, re.MULTILINE)
    assert re.search(r"^instructions +- +- +-$", shown, re.MULTILINE)
    assert not out.exists()
    (tmp_path / "listing").write_text(listing())
    program.write_text(f"#!/bin/sh\ncat {tmp_path / 'listing'}\n")
    program.chmod(0o755)
    assert validation.main(missing) == 0
    assert re.search(r"^instructions +98 +98 +98$", capsys.readouterr().out, re.MULTILINE)
    header, rows = store.load(out)
    assert header["device"] == "sm_90a"
    assert [row["impl"] for row in rows] == list(word_orders.BUILDS)
    assert {(row["value"], row["live"], row["conflicts"]) for row in rows} == {(98, 215, 0)}


class Array(np.ndarray):
    """An array that says where it lies as CuPy's do."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


@pytest.fixture
def on_emulator(monkeypatch):
    """In place of CuPy and of launches: NumPy and the emulator; returns the builds that ran."""

    def view(x):
        return np.array(x).view(Array)

    ran = []

    class Forward:
        def __init__(self, problem, out, row, other, device):
            assert other == "other"
            self.row, self.problem, self.out = row, problem, out

        def __call__(self, pointers, counter, told):
            row = self.row
            filled, maps, parts = fwd_sm90_params.fill(
                self.problem, self.out, row.tile_m, row.tile_n
            )
            for name in fwd_sm90_params.MAPPED:
                at = pointers[fwd_params.POINTERS.index(name)]
                filled[f"{name}_map"].view(np.uint64)[:] = emulator.tensor_map(at, *maps[name])
            ((first, tiles, *rest),) = parts
            common = filled["common"]
            common[list(fwd_params.POINTERS)] = pointers
            common["first_batch"], common["aligned"] = first, 1
            if told is not None:
                common["mask"] = tuple(told)
            filled["scheduler"] = (0, 1, tiles, *rest)
            emulator.launch_row(row, tiles, filled)
            ran.append(row.row_major if row.sparse else None)

    def call_mask(problem, device):
        def told(mask):
            lists = lists_of(problem, mask)
            return lists.pointers(), lists

        return told

    def variant_for(problem, device, out=None):
        plain = next(r for r in VARIANTS if r.name == FRAGMENT.name.removesuffix("-sparse"))
        return "other" if out is None else FRAGMENT if problem.mask is not None else plain

    modules = {
        "cupy": {
            "cuda": SimpleNamespace(Device=lambda: SimpleNamespace(id=0)),
            "full": lambda *x: view(np.full(*x)),
        },
        "fa_cupy.gpu.masks.binding": {
            "CallMask": call_mask,
            "device_lists": lambda mask, device: mask.lists,
        },
        "fa_cupy.gpu.kernels.attention.fwd_sm90": {"FwdSm90": Forward},
        "fa_cupy.gpu.plan": {"variant_for": variant_for},
    }
    for name, names in modules.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(peers, "to_device", view)
    found = peers.module
    monkeypatch.setattr(peers, "module", lambda name: np if name == "cupy" else found(name))
    monkeypatch.setattr(sparse_peers, "bit_mask", lambda case, of: BitMask.from_dense(of[0]))
    rng = np.random.default_rng(0)
    shape = SMALL.batch, SMALL.heads, SMALL.length, SMALL.head_dim
    qkv = [view(draw(*shape, dtype=DTYPES["bfloat16"], seed=i)) for i in range(3)]
    arrays = *qkv, rng.random((SMALL.length, SMALL.length)) < 0.5
    monkeypatch.setattr(sparse_peers, "random_cupy", lambda case, seed: arrays)
    monkeypatch.setattr(word_orders.bench, "burst", lambda *_: 1.0)
    return ran


@pytest.mark.emulator
def test_builds_are_timed_on_the_same_mask(on_emulator):
    rows = word_orders.timed(SMALL, 1)
    assert on_emulator == [0, 1, 2]
    assert [row["impl"] for row in rows] == ["dense", *word_orders.BUILDS]
    assert all(row["error"] < 1e-2 for row in rows[1:])
    assert {row["ms"] for row in rows} == {1.0}
    static = [{"impl": row["impl"], "sizes": (8,)} for row in rows[1:]]
    assert re.search(
        r"^over no mask +1.000 +1.000 +1.000$", word_orders.text_of(static, rows), re.M
    )


@pytest.mark.emulator
def test_an_output_that_differs_is_not_timed(on_emulator, monkeypatch):
    unpack = layouts.unpack
    monkeypatch.setattr(layouts, "unpack", lambda words: ~unpack(words))
    with pytest.raises(RuntimeError, match="row_major: relative error"):
        word_orders.timed(SMALL, 1)
    monkeypatch.setattr(word_orders.report, "ERROR_LIMIT", {"bf16": 2.0})
    with pytest.raises(RuntimeError, match="row_major: the output is not that of fragment order"):
        word_orders.timed(SMALL, 1)
