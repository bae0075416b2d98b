"""Every row of the variant table compiles, without a GPU, into what it promises."""

import re

import pytest

from fa_cupy.gpu.driver import compile, nvrtc
from fa_cupy.gpu.driver.targets import SHARED_LIMIT, number_of
from fa_cupy.gpu.kernels.attention import bwd_nonfinite
from fa_cupy.gpu.kernels.forward import VARIANTS
from fa_cupy.gpu.kernels.registry import ROWS as ALL
from validation import sass
from validation.sass import USUAL

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

# setmaxnreg ignored; a wgmma pipeline serialised by a call, by too few registers, by an accumulator
# that is read too early, or for another reason.
SLOW_NOTES = ("C7508", "C7510", "C7511", "C7512", "C7513", "C7514")


def always():
    """The rows that `make test` compiles: of each kernel one, for one of the usual targets.

    It is one of those of the smallest dim, which take half the time of others, and may be one for
    masks, scores or packed sequences.
    """
    by_kernel = {}
    for row in ALL:
        for target in sorted({*USUAL} & {*row.targets}):
            by_kernel.setdefault(row.source, []).append((row, target))
    for i, pairs in enumerate(by_kernel.values()):
        dim = min(row.dim for row, _ in pairs)
        small = [(row.name, target) for row, target in pairs if row.dim == dim]
        yield small[7 * i % len(small)]


ALWAYS = {*always()}


def marks_of(row, target):
    """Targets that are not usual take their time: `make compile-all`."""
    if target not in USUAL:
        return pytest.mark.slow
    return () if (row.name, target) in ALWAYS else pytest.mark.long


ROWS = [
    pytest.param(row, target, marks=marks_of(row, target), id=f"{row.name}-{target}")
    for row in ALL
    # Targets of PTX differ in the rows that they have, not in what is compiled.
    for target in {nvrtc.architecture(target): target for target in row.targets}.values()
]
MADE_WITH, RECORDED = sass.read(sass.TABLE)


def check_ptx(row, compiled):
    """What the driver takes: text that ends in a zero byte."""
    assert compiled.cubin.endswith(b"\n\0")
    text = compiled.cubin[:-1].decode()
    assert f".visible .entry {row.entry}(" in text
    assert re.search(r"^\.target sm_80$", text, re.MULTILINE)
    assert "warning" not in compiled.log


def check_code(row, target, compiled):
    """Machine code changes on purpose only."""
    recorded = {t: entry for t, entry in RECORDED.get(row.name, {}).items() if t == target}
    found = {target: sass.entry_of(compiled)}
    changed = sass.changes({row.name: recorded}, {row.name: found})
    assert not changed, f"{changed[0]}; {sass.ADVICE}"


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
        # Builds for other scores may spill some registers.
        most = 0 if row.score is None else 512
        assert max(found.stack, found.spill_stores, found.spill_loads) <= most
    if target in USUAL and sass.version() == MADE_WITH:
        check_code(row, target, compiled)


def test_names_are_unique():
    assert len({row.name for row in ALL}) == len(ALL)


def test_the_table_of_machine_code_has_every_row_and_target():
    wanted = {(row.name, target) for row in ALL for target in sass.targets_of(row)}
    assert {(name, target) for name, row in RECORDED.items() for target in row} == wanted


def test_the_table_of_machine_code_was_made_with_the_pinned_compiler():
    assert f"nvidia-cuda-nvrtc=={MADE_WITH}\n" in (compile.ROOT / "setup.cfg").read_text()


CODE = """
constexpr unsigned unused = 7;
__device__ const float steps[4] = {1.0f, 2.0f, 4.0f, 8.0f};
template <int kBytes> struct Room { char bytes[kBytes]; };
extern "C" __global__ void kernel(float* out, const int* which) {
  __shared__ Room<256> room;
  room.bytes[threadIdx.x & 127] = which[1];
  __syncthreads();
  out[threadIdx.x] = USED * (which[0] + 3.5f) + room.bytes[which[2] & 127];
}
"""
ONE, READ = "1", "steps[which[threadIdx.x] & 3]"


def hash_with(target, used, old="", new=""):
    """The hash of the kernel above with an edit."""
    assert old in CODE
    source = CODE.replace(old, new).replace("USED", used.replace(old, new) if old else used)
    return sass.code_hash(compile.compile_source("hashed", source.encode(), target))


@pytest.mark.parametrize("target", USUAL)
@pytest.mark.parametrize(
    ("used", "old", "new"),
    [
        (ONE, "kernel", "another_name"),
        (ONE, "room", "a_longer_name"),
        (ONE, "Room", "Space"),
        (ONE, "unused = 7", "renamed = 8"),
        (ONE, "constexpr unsigned unused = 7;", ""),
        (ONE, "8.0f", "9.0f"),
        (READ, "kernel", "another_name"),
        (READ, "steps", "levels"),
        (READ, "\n__device__", "  // a comment\n__device__"),
    ],
)
def test_hash_of_machine_code_ignores(target, used, old, new):
    assert hash_with(target, used, old, new) == hash_with(target, used)


@pytest.mark.parametrize("target", USUAL)
@pytest.mark.parametrize(
    ("used", "old", "new"),
    [
        (ONE, "3.5f", "3.25f"),
        (ONE, "threadIdx.x]", "threadIdx.y]"),
        (ONE, "Room<256>", "Room<512>"),
        (READ, "8.0f", "9.0f"),
    ],
)
def test_hash_of_machine_code_sees(target, used, old, new):
    assert hash_with(target, used, old, new) != hash_with(target, used)


def test_hash_of_machine_code_sees_what_a_launch_gets():
    compiled = compile.compile_variant(VARIANTS[0], "sm_80")
    for old, new in ((" registers", "0 registers"), (" bytes stack", "0 bytes stack")):
        assert old in compiled.log
        changed = compiled._replace(log=re.sub(rf"\d{old}", f"1{new}", compiled.log))
        assert sass.code_hash(changed) != sass.code_hash(compiled)


def test_sections_of_a_cubin():
    (row,) = (row for row in bwd_nonfinite.VARIANTS if row.dtype == "float16")
    found = dict(sass.sections(compile.compile_variant(row, "sm_90a").cubin))
    assert found[""] == b""
    assert len(found[f".text.{row.entry}"]) % 128 == 0
    assert found[f".text.{row.entry}"].strip(b"\0")
    assert row.entry.encode() in found[".strtab"]
    assert found[f".nv.shared.{row.entry}"] == b""  # reserved, not stored


def entry(code, registers=32):
    return {"code": code, "registers": registers, "spilled": 0}


def test_changes_of_the_table_are_named():
    old = {"a": {"sm_80": entry("1"), "sm_90a": entry("2")}, "b": {"sm_80": entry("3")}}
    new = {"a": {"sm_80": entry("1", 40), "sm_90a": entry("4", 40)}, "c": {"sm_80": entry("3")}}
    assert sass.changes(old, old) == []
    assert sass.changes(old, new) == [
        "changed  a sm_90a: 32 registers, 0 B spilled, now 40 registers, 0 B spilled",
        "gone     b sm_80",
        "new      c sm_80: 32 registers, 0 B spilled",
    ]


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table of one small row and one that is gone."""
    path = tmp_path / "sass.json"
    monkeypatch.setattr(sass, "TABLE", path)
    (row,) = (row for row in bwd_nonfinite.VARIANTS if row.dtype == "float16")
    found = {row.name: {t: sass.entry_of(compile.compile_variant(row, t)) for t in USUAL}}
    sass.write(path, sass.version(), {**found, "gone": {"sm_80": entry("1")}})
    return path, row.name


@pytest.mark.long
def test_sass_compares_and_renews(table, capsys):
    path, name = table
    command = ["--rows", name]
    assert sass.main(command) == sass.SAME
    assert "rows chosen (1) is as in the table" in capsys.readouterr().out
    made_with, rows = sass.read(path)
    right = rows[name]["sm_80"]["code"]
    rows[name]["sm_80"]["code"] = "0"
    sass.write(path, made_with, rows)
    assert sass.main(command) == sass.DIFFERENT
    said = capsys.readouterr().out
    assert f"changed  {name} sm_80" in said
    assert "sass --write" in said
    assert sass.main([*command, "--write"]) == sass.SAME
    assert sass.read(path)[1][name]["sm_80"]["code"] == right
    assert "gone" in sass.read(path)[1]


def test_sass_does_not_compare_with_another_nvrtc(table, capsys):
    path, name = table
    sass.write(path, "12.0.1", sass.read(path)[1])
    for command in ([], ["--rows", name, "--write"]):
        assert sass.main(command) == sass.OTHER_NVRTC
        (line,) = capsys.readouterr().out.splitlines()
        assert f"made with NVRTC 12.0.1, this is {sass.version()}" in line


def test_every_kernel_has_a_row_and_every_row_a_kernel():
    folder = compile.ROOT / "cuda_src"
    files = {p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.cu")}
    assert files == {row.source for row in ALL}


def test_a_kernel_has_few_rows():
    sources = [row.source for row in ALL]
    # Five dims or six, two dtypes, with a mask or not, for plain scores or others; in one of the
    # dtypes, those for packed sequences and with dropout, and of fwd_sm90 for numbers of keys,
    # pages, parts and rows of a bias that are not aligned.
    assert all(sources.count(source) <= 84 for source in sources)


def test_a_row_is_for_the_targets_whose_shared_memory_it_fits():
    for row in ALL:
        assert row.targets
        assert all(row.shared_bytes <= SHARED_LIMIT[target] for target in row.targets)


@pytest.mark.parametrize("target", USUAL)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_rarely_has_work_takes_little_time_to_compile(dtype, target):
    """Seconds depend on the machine; they go with the size, which was 240 KB in 4 to 6 s."""
    (row,) = (row for row in bwd_nonfinite.VARIANTS if row.dtype == dtype)
    assert len(compile.compile_variant(row, target).cubin) < 80_000


@pytest.mark.parametrize("row", VARIANTS[:1], ids=lambda row: row.name)
def test_ptx_of_a_row(row):
    text = compile.emit_ptx(row, "sm_80")
    assert f".visible .entry {row.entry}(" in text
    assert ".target sm_80" in text
    assert text.isprintable() or set(filter(lambda c: not c.isprintable(), text)) <= set("\n\t")


def test_a_kernel_without_a_report_is_compiled_anew_for_the_table(monkeypatch):
    """NVRTC says nothing of registers where its own cache has the kernel."""
    row = next(row for row in ALL if row.entry == "mask_transpose_words")
    want, real, asked = sass._compiled(row, "sm_90a"), compile.compile_variant, []

    def silent(variant, target, anew=False):
        asked.append(anew)
        found = real(variant, target, anew)
        return found if anew else found._replace(log="")

    monkeypatch.setattr(compile, "compile_variant", silent)
    assert sass._compiled(row, "sm_90a") == want
    assert want["registers"] > 0
    assert asked == [False, True]
