"""``python -m fa_cupy demo``: a photograph is denoised by attention, as `non_local_means`."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fa_cupy.cli import counted

PHOTOGRAPH = "grace_hopper.jpg"
DTYPES = ("float16", "bfloat16", "float32", "float64")
SHORT, EXACT = "float16", "float64"  # what another dtype is compared with

PATCH = 5  # pixels of a side of the patches
REACH = 11  # pixels; how far away a pixel may be that counts
_BANDWIDTH = 0.8  # h as a part of the noise

# Less noise than the first does not show in 8 bits, and more than the second leaves no picture.
_SIGMAS = (0.001, 10.0)

Image = NDArray[np.float32]  # (height, width, 3), 0 to 1 where it is not noisy


class DemoError(Exception):
    """Something outside the demo is missing; the message is all that the user needs."""


class Result(NamedTuple):
    """A denoised image and what it took."""

    image: Image
    found: NDArray[np.float64]  # what was computed, not cut to the range of a picture
    dtype: str
    seconds: float
    tflops: float  # in TFLOP/s, counting 2 (head_dim + v_dim) operations a pair that counts

    def __str__(self) -> str:
        speed = f"{self.tflops:.3g} T" if self.tflops >= 1 else f"{1e3 * self.tflops:.3g} G"
        return f"{self.seconds:.3g} s, {speed}FLOP/s"


def photograph(height: int | None = None) -> Image:
    """Return matplotlib's sample photograph, reduced to `height` rows where one is given."""
    try:
        import matplotlib.cbook
        import PIL.Image
    except ImportError as error:
        raise DemoError(f"needs matplotlib ({error}): pip install 'fa_cupy[plot]'") from None
    path = matplotlib.cbook.get_sample_data(PHOTOGRAPH, asfileobj=False)
    with PIL.Image.open(path) as file:
        picture = file.convert("RGB")
    if height is not None and height < picture.height:
        size = (round(picture.width * height / picture.height), height)
        picture = picture.resize(size, PIL.Image.Resampling.BOX)
    return np.asarray(picture, dtype=np.float32) / np.float32(255)


def denoise(
    noisy: Image,
    sigma: float,
    *,
    xp: Any = np,
    dtype: Any = np.float32,
    sync: Callable[[], None] | None = None,
    reach: int | None = REACH,
) -> Result:
    """Denoise `noisy`, which carries Gaussian noise of standard deviation `sigma`.

    Parameters
    ----------
    noisy : ndarray, shape (height, width, 3)
    sigma : float
        All else follows from it, so that nothing is tuned on the clean picture.
    xp : module
        `numpy` or `cupy`: where it runs.
    dtype : dtype
        Of patches and pixels.
    sync : callable, optional
        Waits for the device. Where it is given, a call that is not timed comes first, which
        compiles the kernel or reads it from the cache.
    reach : int or None
        How far away a pixel may be that counts; None for any.

    Returns
    -------
    Result
    """
    from fa_cupy import non_local_means

    image = xp.asarray(noisy.astype(dtype))  # on the host: CuPy does not convert bfloat16

    def call() -> Any:
        return non_local_means(image, _BANDWIDTH * sigma, PATCH, reach, sigma=sigma)

    if sync is not None:
        call()
        sync()
    start = time.perf_counter()
    result = call()
    if sync is not None:
        sync()
    seconds = time.perf_counter() - start
    found = (result if xp is np else xp.asnumpy(result)).astype(np.float64)
    image = found.astype(np.float32).clip(0.0, 1.0)
    work = 2.0 * pairs_within(reach, *noisy.shape[:2]) * (PATCH**2 + 1) * noisy.shape[2]
    return Result(image, found, str(np.dtype(dtype)), seconds, work / seconds / 1e12)


def pairs_within(reach: int | None, *sides: int) -> int:
    """Return how many pairs of pixels an image of `sides` has that are near enough."""
    if reach is None:
        return math.prod(sides) ** 2
    return math.prod(
        sum(min(i + reach + 1, side) - max(i - reach, 0) for i in range(side)) for side in sides
    )


def psnr(image: Image, original: Image) -> float:
    """Return the peak signal-to-noise ratio in dB of `image`, with its values cut to [0, 1]."""
    return -10.0 * math.log10(float(np.mean((image.clip(0.0, 1.0) - original) ** 2)))


def _dtype(name: str) -> np.dtype[Any]:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _compare(result: Result, again: Callable[[str], Result]) -> None:
    """Print the error of `result`, and time and error of a run in 16 bits, which it may replace.

    Errors are those against float64, whose run is not timed here.
    """
    from fa_cupy import reference

    exact = result if result.dtype == EXACT else again(EXACT)

    def error(other: Result) -> str:
        if other is exact:
            return "what the others are held against"
        return f"{reference.relative_error(other.found, exact.found):.1e} from {EXACT}"

    print(f"error       {error(result)}", flush=True)
    if _dtype(result.dtype).itemsize > 2:
        half = again(SHORT)
        print(f"{half.dtype:<11} {half}, {error(half)}")
        print(f"            {result.dtype} takes {result.seconds / half.seconds:.3g} times as long")


def _cupy(device: str) -> Any:
    """Return CuPy for a run on the GPU, or None for one on the CPU."""
    if device == "cpu":
        return None
    from fa_cupy.gpu.driver import devices, remedies

    found, why = devices.look()
    if found:
        return devices.import_cupy()[0]
    if device == "gpu":
        hint = f": {remedies.command('CuPy')}" if why == devices.ABSENT else ""
        raise DemoError(f"--device gpu: {why}{hint}")
    return None


def _check_output(path: Path) -> None:
    """Raise before the work where the picture could not be written after it."""
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise DemoError(f"cannot write {path}: its name must end in .{', .'.join(sorted(formats))}")
    if not path.parent.is_dir():
        raise DemoError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK) or path.is_dir():
        raise DemoError(f"cannot write {path}: no permission, or a folder of that name")


def _run(options: argparse.Namespace) -> None:
    cupy = _cupy(options.device)
    original = photograph(options.size)
    _check_output(options.output)
    rng = np.random.default_rng(0)
    noise = options.sigma * rng.standard_normal(original.shape, dtype=np.float32)
    noisy = original + noise

    rows, columns, _ = original.shape
    if cupy:
        device = cupy.cuda.Device()
        name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
        where, usual = {"xp": cupy, "sync": device.synchronize}, SHORT
    else:
        from fa_cupy.cpu import thread_pool

        name, where, usual = f"CPU, {counted(thread_pool.allowed(), 'thread')}", {}, "float32"

    def run(dtype: str, reach: int | None = REACH) -> Result:
        return denoise(noisy, options.sigma, dtype=_dtype(dtype), reach=reach, **where)

    print(f"device      {name}")
    print(f"photograph  {columns} x {rows}, {rows * columns:,} pixels", flush=True)
    result = run(options.dtype or usual)

    before, after = psnr(noisy, original), psnr(result.image, original)
    side = 2 * REACH + 1
    print(f"attention   of {PATCH} x {PATCH} x 3 patches to {side} x {side}, {result.dtype}")
    print(f"time        {result}")
    if cupy:
        print(f"            {run(result.dtype, None)} to the whole picture")
    if options.dtype:
        _compare(result, run)
    print(f"PSNR        {before:.1f} dB noisy, {after:.1f} dB denoised: {after - before:+.1f} dB")

    from fa_cupy import plot

    plot.images(
        {
            f"noisy, {before:.1f} dB": noisy,
            f"denoised, {after:.1f} dB, {result.seconds:.2g} s": result.image,
            "original": original,
        },
        options.output,
    )
    print(f"picture     {options.output}")


def _rows(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def _sigma(text: str) -> float:
    least, most = _SIGMAS
    try:
        sigma = float(text)
    except ValueError:
        sigma = math.nan
    if not least <= sigma <= most:
        raise argparse.ArgumentTypeError(f"{text} is not a number from {least} to {most}")
    return sigma


def main(args: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fa_cupy demo",
        description="Denoise a photograph by non-local means, written as attention.",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("demo.png"), help="the picture")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of patches and pixels; shows what it costs: its error, and time and error of "
        f"{SHORT} (without it: {SHORT} on a GPU, float32 on the CPU, and no comparison)",
    )
    parser.add_argument(
        "--size",
        type=_rows,
        metavar="ROWS",
        help="reduce the photograph to this height",
    )
    parser.add_argument(
        "--sigma",
        type=_sigma,
        default=0.1,
        help="standard deviation of the noise that is added, in parts of the full range "
        "(default: 0.1)",
    )
    try:
        _run(parser.parse_args(args))
    except BrokenPipeError:  # the reader of the output has enough
        raise
    except (DemoError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0
