"""Every row of the variant table compiles, without a GPU, into what it promises."""

import re

import pytest

from fa_cupy.gpu.driver import compile, nvrtc
from fa_cupy.gpu.kernels.attention.bwd_sm80_variants import BACKWARD_SM80
from fa_cupy.gpu.kernels.attention.bwd_sm90_variants import BACKWARD, BwdRedo
from fa_cupy.gpu.kernels.attention.fwd_variants import SHARED_LIMIT, VARIANTS, number_of
from fa_cupy.gpu.kernels.linear.sm80_variants import PRODUCTS
from fa_cupy.gpu.kernels.mask.variants import MASKS

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

# The further targets take their time: `make compile-all`.
USUAL = ("sm_80", "sm_90a")
# setmaxnreg ignored; a wgmma pipeline serialised by a call, by too few registers, by an accumulator
# that is read too early, or for another reason.
SLOW_NOTES = ("C7508", "C7510", "C7511", "C7512", "C7513", "C7514")

ALL = (*VARIANTS, *PRODUCTS, *BACKWARD, *BACKWARD_SM80, *MASKS)
ROWS = [
    pytest.param(
        row, target, marks=() if target in USUAL else pytest.mark.slow, id=f"{row.name}-{target}"
    )
    for row in ALL
    # Targets of PTX differ in the rows that they have, not in what is compiled.
    for target in {nvrtc.architecture(target): target for target in row.targets}.values()
]


def check_ptx(row, compiled):
    """What the driver takes: text that ends in a zero byte."""
    assert compiled.cubin.endswith(b"\n\0")
    text = compiled.cubin[:-1].decode()
    assert f".visible .entry {row.entry}(" in text
    assert re.search(r"^\.target sm_80$", text, re.MULTILINE)
    assert "warning" not in compiled.log


@pytest.mark.parametrize(("row", "target"), ROWS)
def test_row_compiles_into_what_it_promises(row, target):
    if number_of(target) not in nvrtc.capabilities():
        pytest.skip(f"NVRTC {nvrtc.version()} does not know {target}")
    compiled = compile.compile_variant(row, target)
    if nvrtc.kind_of(target) == "PTX":
        check_ptx(row, compiled)
        return
    found = compile.resource_report(compiled.log)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert compiled.log.count("Compiling entry function") == 1
    assert f"Compiling entry function '{row.entry}' for '{target}'" in compiled.log
    assert "warning" not in compiled.log
    assert row.shared_bytes + found.static_shared <= SHARED_LIMIT[target]
    assert 0 < found.registers * row.threads <= 65536
    assert not [note for note in found.notes if any(code in note for code in SLOW_NOTES)]
    if target in row.hot_targets:
        assert (found.stack, found.spill_stores, found.spill_loads) == (0, 0, 0)


def test_names_are_unique():
    assert len({row.name for row in ALL}) == len(ALL)


def test_every_kernel_has_a_row_and_every_row_a_kernel():
    folder = compile.ROOT / "cuda_src"
    files = {p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.cu")}
    assert files == {row.source for row in ALL}


def test_a_kernel_has_few_rows():
    sources = [row.source for row in ALL]
    # Five dims, two dtypes, with a transform of the scores or a mask or both or neither.
    assert all(sources.count(source) <= 40 for source in sources)


def test_a_row_is_for_the_targets_whose_shared_memory_it_fits():
    for row in ALL:
        assert row.targets
        assert all(row.shared_bytes <= SHARED_LIMIT[target] for target in row.targets)


@pytest.mark.parametrize("target", USUAL)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_rarely_has_work_takes_little_time_to_compile(dtype, target):
    """Seconds depend on the machine; they go with the size, which was 240 KB in 4 to 6 s."""
    (row,) = (row for row in BACKWARD if isinstance(row, BwdRedo) and row.dtype == dtype)
    assert len(compile.compile_variant(row, target).cubin) < 80_000


@pytest.mark.parametrize("row", VARIANTS[:1], ids=lambda row: row.name)
def test_ptx_of_a_row(row):
    text = compile.emit_ptx(row, "sm_80")
    assert f".visible .entry {row.entry}(" in text
    assert ".target sm_80" in text
    assert text.isprintable() or set(filter(lambda c: not c.isprintable(), text)) <= set("\n\t")
