"""Result files: a header, rows merged by (family, case, impl), and tables of them."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import json
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]

_DISTRIBUTIONS = (
    *("numpy", "scipy", "cupy-cuda12x", "cupy-cuda13x"),
    *("torch", "triton", "fla-core", "jax", "jaxlib"),
)


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def gpu_available() -> bool:
    """Whether CuPy is installed and sees a device."""
    try:
        import cupy

        return bool(cupy.cuda.runtime.getDeviceCount() > 0)
    except Exception:  # no CuPy, no driver, no device: all mean the CPU
        return False


def slug(device: str) -> str:
    """Name of a device in file names: 'NVIDIA H200' gives 'h200', 'cpu' stays."""
    name = re.sub(r"^nvidia\s+", "", device.strip().lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def versions() -> dict[str, str]:
    """Versions of what takes part in a measurement and is installed."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    match = re.search(r"model name\s*:\s*(.+)", text)
    return match.group(1) if match else platform.processor()


def openblas_core(folder: str) -> str:
    """Return the processor that the OpenBLAS below a folder of that name has chosen kernels for.

    The variable OPENBLAS_CORETYPE chooses another one.
    """
    import threadpoolctl  # late: a receipt is marked with an interpreter that has nothing installed

    for library in threadpoolctl.threadpool_info():
        if folder in Path(os.path.realpath(library["filepath"])).parts:
            return str(library.get("architecture", "unknown"))
    return "unknown"


def _openblas() -> str:
    """Name the kernels of NumPy's OpenBLAS and of fa_cupy's, once if they are the same."""
    importlib.import_module("fa_cupy.cpu.blas")  # which loads it
    return ", ".join(dict.fromkeys(map(openblas_core, ("scipy_openblas32", "numpy.libs"))))


def card(device: int) -> str:
    """Name one GPU among all others, as ``nvidia-smi -L`` does.

    Cards of one kind differ: by a tenth in some figures, where latencies of the L2 cache decide.
    """
    from cuda.bindings import driver

    error, handle = driver.cuDeviceGet(device)
    error, uuid = driver.cuDeviceGetUuid(handle) if not int(error) else (error, None)
    if uuid is None or int(error):
        raise RuntimeError(f"the driver does not tell the UUID of device {device}: {error.name}")
    return f"GPU-{UUID(bytes=bytes(uuid.bytes))}"


def header(device: str) -> dict[str, Any]:
    """What the rows were measured on; ``device`` is ``"gpu"`` (CuPy's current) or ``"cpu"``."""
    if device == "cpu":
        facts: dict[str, Any] = {"device": "cpu", "cpu": _cpu_model(), "cores": os.cpu_count()}
        facts["openblas"] = _openblas()
    else:
        import cupy

        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        facts = {
            "device": properties["name"].decode(),
            "card": card(cupy.cuda.Device().id),
            "multiprocessors": properties["multiProcessorCount"],
            "memory_gib": round(properties["totalGlobalMem"] / 2**30, 1),
            "cuda_driver": cupy.cuda.runtime.driverGetVersion(),
            "cuda_runtime": cupy.cuda.runtime.runtimeGetVersion(),
            "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        }
    return {**facts, "versions": versions(), "date": now()}


def path_for(kind: str, facts: Mapping[str, Any]) -> Path:
    """``validation/results/<kind>-<device>.json``."""
    return RESULTS / f"{kind}-{slug(facts['device'])}.json"


def load(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Header and rows of a file; both empty where there is none."""
    if not path.exists():
        return {}, []
    data = json.loads(path.read_text(encoding="utf-8"))
    return data["header"], data["rows"]


def key(row: Row) -> tuple[str, str, str]:
    """What a row is merged by."""
    return row["family"], row["case"], row["impl"]


def merge(path: Path, facts: Mapping[str, Any], rows: Iterable[Row]) -> list[Row]:
    """Replace the rows of the same key in ``path``, keep the others, return all of them.

    Every row gets the date of its run, as a ratio is only taken between rows of one date, and the
    card or the kernels of OpenBLAS, if it is of some.
    """
    run = {name: facts[name] for name in ("date", "card", "openblas") if name in facts}
    fresh = {key(row): {**row, **run} for row in rows}
    merged = {key(row): row for row in load(path)[1]} | fresh
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(_finite(row)) for row in merged.values())
    text = f'{{"header": {json.dumps(dict(facts), indent=1)},\n "rows": [\n  {lines}\n]}}\n'
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    return list(merged.values())


def _finite(row: Row) -> Row:
    """JSON has no inf and no NaN: an error that is one becomes a string."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean logarithm."""
    return math.exp(sum(map(math.log, values)) / len(values))


def align(table: Sequence[Sequence[str]]) -> str:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    )
