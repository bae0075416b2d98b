"""The wheel and the sdist hold what they should, and the wheel works from any folder."""

import configparser
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import fa_cupy
from fa_cupy import _version
from fa_cupy.cli import cuda_extra
from validation.digest import ROOT

FOLDERS = ("cuda_src", "docs", "fa_cupy", "ptx", "tests", "validation")
FILES = ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in")
FILES += ("Makefile", "README.md", ".clang-format", "pyproject.toml", "setup.cfg")
JUNK = shutil.ignore_patterns("__pycache__", "_build", "generated", ".*")


def listing(root, *folders):
    found = (path for folder in folders for path in (root / folder).rglob("*"))
    return {path.relative_to(root).as_posix() for path in found if path.is_file()}


def build(kind, source, target):
    """Build without isolation: nothing is downloaded, and no bytecode written to the source."""
    code = f"import sys; from setuptools.build_meta import build_{kind} as b; b(sys.argv[1])"
    command = [sys.executable, "-c", code, str(target)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(target.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A clean copy of the tree."""
    root = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, root / folder, ignore=JUNK)
    for name in FILES:
        shutil.copy(ROOT / name, root)
    return root


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", source, folder)) as archive:
        for member in archive.getmembers():
            archive.extract(member, folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel as an index would serve it: built from the sdist."""
    return build("wheel", sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """Run the fresh environment's Python from another folder."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*command, "--no-deps", "--no-index", str(wheel)], check=True)
    # The dependencies come from this environment. A folder named in a .pth file is searched, but
    # its own .pth files are not read, so an editable install there stays out of sight.
    site = next((folder / "env").rglob("site-packages"))
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "dependencies.pth").write_text("\n".join(paths))
    # The compiler's wheel is looked for in the environment's own folder only.
    libraries = Path(sysconfig.get_path("purelib")) / "nvidia"
    if libraries.is_dir():
        (site / "nvidia").symlink_to(libraries)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    clean["FA_CUPY_CACHE_DIR"] = str(folder / "cache")

    def run(*arguments):
        command = [str(python), *arguments]
        return subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True)

    return run


def test_sdist_holds_the_whole_project(source, sdist):
    assert listing(sdist, *FOLDERS) == listing(source, *FOLDERS)
    assert {path.name for path in sdist.iterdir()} >= {*FILES}


def test_wheel_holds_the_package_and_all_kernels(source, wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert any(name.endswith("/LICENSE") for name in archive.namelist())
    kernels = {f"fa_cupy/{name}" for name in listing(source, "cuda_src", "ptx")}
    assert names == listing(source, "fa_cupy") | kernels
    assert {"fa_cupy/py.typed", "fa_cupy/__init__.pyi"} <= set(names)  # for type checkers
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 1.2e6


def test_the_citation_is_of_the_release_that_is_there_or_comes_next(source):
    cited = re.search(r"^version: (\S+)$", (source / "CITATION.cff").read_text(), re.MULTILINE)
    here = Version(fa_cupy.__version__)
    assert (
        Version(cited[1]) == here
        if not here.is_devrelease
        else Version(cited[1])
        >= Version(".".join(map(str, (*here.release[:-1], max(0, here.release[-1] - 1)))))
    )


def test_versions_of_distributions(source, sdist, wheel, run):
    """Those of a copy without git; `sdist` and `wheel` keep what they were built with."""
    of_sdist, of_wheel = sdist.name.removeprefix("fa_cupy-"), wheel.name.split("-")[1]
    assert of_sdist == of_wheel == f"{_version.FIRST}.dev0"
    done = run("-c", "import fa_cupy; print(fa_cupy.__version__)")
    assert done.stdout.strip() == of_wheel, done.stderr


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with the module that finds the version, and what runs git in it."""
    for place in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{place}_NAME", "a")
        monkeypatch.setenv(f"GIT_{place}_EMAIL", "a@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    root = tmp_path / "checkout"
    (root / "fa_cupy").mkdir(parents=True)
    shutil.copy(ROOT / "fa_cupy/_version.py", root / "fa_cupy")
    shutil.copy(ROOT / ".gitattributes", root)

    def git(*arguments):
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    return root, git


def version_in(root):
    found = runpy.run_path(str(root / "fa_cupy/_version.py"))["version"]()
    assert str(Version(found)) == found  # as PEP 440 writes it
    return found


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_versions_of_checkouts(checkout):
    root, git = checkout
    commit = git("rev-parse", "--short", "HEAD").strip()
    assert version_in(root) == f"{_version.FIRST}.dev1+g{commit}"
    git("tag", "other")
    git("tag", "v1.2.9")
    assert version_in(root) == "1.2.9"
    git("commit", "--allow-empty", "-qm", "two")
    commit = git("rev-parse", "--short", "HEAD").strip()
    assert version_in(root) == f"1.2.10.dev1+g{commit}"
    with (root / "fa_cupy/_version.py").open("a") as file:
        file.write("\n")
    assert version_in(root) == f"1.2.10.dev1+g{commit}.dirty"


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
@pytest.mark.parametrize("tagged", [False, True])
def test_versions_of_archives(checkout, tmp_path, tagged):
    """Of `git archive`, which has no repository and names the tag all the same."""
    _, git = checkout
    if tagged:
        git("tag", "v1.2.9")
    git("archive", "-o", str(tmp_path / "a.tar"), "HEAD")
    with tarfile.open(tmp_path / "a.tar") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    want = "1.2.9" if tagged else f"{_version.FIRST}.dev0"
    assert version_in(tmp_path / "unpacked") == want


def test_version_of_a_folder_where_git_fails(checkout, monkeypatch):
    root, _ = checkout
    monkeypatch.setenv("PATH", "")
    assert version_in(root) == f"{_version.FIRST}.dev0"


def test_indexes_accept_the_distributions(source, sdist, wheel):
    """The README and the metadata, as `twine` checks them before an upload."""
    pytest.importorskip("twine")
    files = [str(path) for path in (wheel, *sdist.parent.glob("*.tar.gz"))]
    assert len(files) == 2
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_packages_are_all_listed(source):
    config = configparser.ConfigParser()
    config.read(source / "setup.cfg")
    found = {Path(p).parent.as_posix() for p in listing(source, "fa_cupy") if "__init__" in p}
    found |= {"fa_cupy/cuda_src", "fa_cupy/ptx"}
    assert {name.replace(".", "/") for name in config["options"]["packages"].split()} == found


def test_wheel_computes_from_another_folder(run):
    done = run(
        "-c",
        "import sys, fa_cupy, numpy\n"
        "assert 'cupy' not in sys.modules\n"
        "x = numpy.eye(4, dtype='float32')\n"
        "assert fa_cupy.attention(x, x, x).shape == (4, 4)\n"
        "print(fa_cupy.__file__, fa_cupy.__version__)",
    )
    assert done.returncode == 0, done.stderr
    place, version = done.stdout.split()
    assert Path(place).is_relative_to(next(p for p in Path(place).parents if p.name == "env"))
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", version)


@pytest.mark.skipif(not importlib.util.find_spec("cuda"), reason="needs cuda-bindings")
def test_wheel_compiles_a_kernel(run):
    done = run(
        "-c",
        "from fa_cupy.gpu.driver import compile\n"
        "from fa_cupy.gpu.kernels.forward import VARIANTS\n"
        "row = VARIANTS[0]\n"
        "print(compile.compile_variant(row, row.targets[0]).cubin[:4])",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == r"b'\x7fELF'"


def test_wheel_runs_info(run):
    done = run("-m", "fa_cupy", "info")
    assert done.returncode == 0, done.stderr
    assert "fa_cupy" in done.stdout


def minimums(source):
    """What setup.cfg requires here, each at the lowest version that it allows."""
    config = configparser.ConfigParser()
    config.read(source / "setup.cfg")
    lines = config["options"]["install_requires"].splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for one in wanted:
        assert [bound.operator for bound in one.specifier] == [">="], one
    here = [one for one in wanted if one.marker is None or one.marker.evaluate()]
    return [str(one.specifier).replace(">=", f"{one.name}==") for one in here]


BATTERY = """
import numpy as np
import fa_cupy
rng = np.random.default_rng(0)
for dtype in ("float16", "float32", "float64"):
    q, k, v = rng.standard_normal((3, 2, 300, 64)).astype(dtype)
    out, lse = fa_cupy.attention(q, k, v, is_causal=True, return_lse=True)
    scores = q.astype(float) @ k.astype(float).swapaxes(1, 2)
    shown = np.where(np.tri(300) > 0, scores / 8, -np.inf)
    weights = np.exp(shown - shown.max(-1, keepdims=True))
    want = weights / weights.sum(-1, keepdims=True) @ v
    assert np.abs(out - want).max() < 2e-3
    dq, dk, dv = fa_cupy.attention_backward(out, q, k, v, out, lse, is_causal=True)
    assert dq.shape == dk.shape == dv.shape == q.shape
    product, state = fa_cupy.causal_product(q, k, v, return_state=True)
    want = np.tril(scores) @ v
    assert np.abs(product - want).max() / np.abs(want).max() < 2e-3
    assert fa_cupy.causal_product_backward(product, q, k, v)[0].shape == q.shape
    assert fa_cupy.linear_attention(q, k, v).shape == v.shape
import ml_dtypes
x = q.astype(ml_dtypes.bfloat16)
assert fa_cupy.attention(x, x, x).dtype == x.dtype
dense = rng.random((300, 300)) < 0.3
dense[:, 0] = True
mask = fa_cupy.BitMask.from_dense(dense)
mask.save("mask.npz")
mask = fa_cupy.BitMask.load("mask.npz")
assert (mask.to_dense() == dense).all()
assert np.allclose(fa_cupy.attention(q, k, v, mask=mask), fa_cupy.attention(q, k, v, mask=dense))
from scipy import sparse
rows = sparse.csr_matrix(dense)
assert (fa_cupy.BitMask.from_csr(rows).to_dense() == dense).all()
assert (mask.to_csr() != rows).nnz == 0
"""


@pytest.mark.long
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="older than wheels for this Python")
def test_wheel_works_with_the_lowest_versions(source, wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*command, "--only-binary", ":all:", *minimums(source), str(wheel)], check=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for arguments in (["-W", "error", "-c", BATTERY], ["-m", "fa_cupy", "info"]):
        command = [str(python), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    for one in minimums(source):
        assert one.replace("==", " ") in done.stdout
    assert "one thread a product" in done.stdout


@pytest.mark.parametrize(
    ("version", "extra"),
    [(13020, "cuda13"), (14000, "cuda13"), (12040, "cuda12"), (11080, ""), (None, "")],
)
def test_driver_chooses_the_extra(version, extra):
    assert cuda_extra.extra(version) == extra


def test_driver_script_answers_without_the_package(tmp_path):
    script = ROOT / "fa_cupy/cli/cuda_extra.py"
    command = [sys.executable, "-I", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("", "cuda12", "cuda13")


def test_a_machine_without_a_driver_gets_no_cuda(monkeypatch):
    monkeypatch.setattr(cuda_extra, "_LIBRARIES", ("libno-such-driver.so",))
    assert cuda_extra.driver_version() is None


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("target", ["test", "test-all", "test-gpu", "bench"])
def test_make_leaves_the_environment_alone_when_given_an_interpreter(target):
    command = ["make", "--dry-run", "--no-print-directory", target, "PY=python3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "python3 -m" in done.stdout
    assert "venv" not in done.stdout
    assert "pip" not in done.stdout.split()


def test_tags_without_a_last_number():
    assert _version.of_description("v1.0.0a") == "1.0.0a"
    found = _version.of_description("v1.0.0a-3-g0abc")
    assert found == "1.0.0a1.dev3+g0abc"
    assert Version("1.0.0a") < Version(found) < Version("1.0.0a1")
