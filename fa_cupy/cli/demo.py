"""``python -m fa_cupy demo``: a photograph is denoised by attention.

Non-local means replaces every pixel by a mean over all pixels, weighted by how alike the patches
around the two are. Written as attention, patches are queries and keys, and pixels are values:
``softmax(-|q - k|**2 / (2 h**2)) @ v``. The part of the exponent that belongs to the query alone
cancels in the softmax; the part of the key is a bias of shape (1, Lk), and 1 / h**2 is the scale.
"""

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
from tqdm import tqdm

PHOTOGRAPH = "grace_hopper.jpg"
CPU_HEIGHT = 300  # pixels, half of the photograph's

_RADIUS = 2  # patches of 5 x 5 pixels
_WINDOW = 1.5  # standard deviation, in pixels, of the weights of a patch's pixels
_REACH = 32.0  # pixels; how far away a patch counts exp(-1/2) less
_BANDWIDTH = 0.3  # h**2 as a part of the noise in one patch
_OWN_WEIGHT = 0.2  # what the pixel itself may weigh, as a part of all others together

# Less noise than the first does not show in 8 bits, and more than the second leaves no picture.
_SIGMAS = (0.001, 10.0)

Image = NDArray[np.float32]  # (height, width, 3), 0 to 1 where it is not noisy


class DemoError(Exception):
    """Something outside the demo is missing; the message is all that the user needs."""


class Result(NamedTuple):
    """A denoised image and what it took."""

    image: Image
    q_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    dtype: str
    seconds: float
    tflops: float  # in TFLOP/s, counting 2 Lq Lk (head_dim + v_dim) operations


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


def features(image: Image, scale: float) -> Image:
    """Return what is compared: per pixel its weighted patch and its place, shape (pixels, 77).

    Squared distances of patches are means over the patch, summed over the channels. Places are
    measured so that `scale` times half the squared distance is ``(pixels / reach)**2 / 2``.
    """
    height, width, _ = image.shape
    side = 2 * _RADIUS + 1
    padded = np.pad(image, ((_RADIUS, _RADIUS), (_RADIUS, _RADIUS), (0, 0)), mode="reflect")
    windows: Any = np.lib.stride_tricks.sliding_window_view  # old stubs take no tuple of axes
    patches = windows(padded, (side, side), axis=(0, 1))
    offset = np.arange(-_RADIUS, _RADIUS + 1)
    window = np.exp(-np.add.outer(offset**2, offset**2) / (2 * _WINDOW**2))
    patches = patches * np.sqrt(window / window.sum()).astype(np.float32)
    place = np.moveaxis(np.indices((height, width)), 0, -1) / (_REACH * math.sqrt(scale))
    rows = np.concatenate([patches.reshape(height, width, -1), place], axis=-1)
    rows = rows.reshape(height * width, -1)
    # Distances do not change, but numbers around zero are rounded finer by float16.
    return np.asarray(rows - rows.mean(axis=0), dtype=np.float32)


def denoise(
    noisy: Image,
    sigma: float,
    *,
    xp: Any = np,
    dtype: Any = np.float32,
    chunk: int = 2048,
    sync: Callable[[], None] = lambda: None,
    quiet: bool = False,
) -> Result:
    """Denoise `noisy`, which carries Gaussian noise of standard deviation `sigma`.

    Parameters
    ----------
    noisy : ndarray, shape (height, width, 3)
    sigma : float
        The bandwidth follows from it, so that nothing is tuned on the clean picture.
    xp : module
        `numpy` or `cupy`: where the attention runs.
    dtype : dtype
        Of queries, keys and values.
    chunk : int
        Queries in one call, and so in one step of the progress bar.
    sync : callable
        Waits for the device.
    quiet : bool
        No progress bar.

    Returns
    -------
    Result
    """
    from fa_cupy import attention

    scale = 1.0 / (_BANDWIDTH * noisy.shape[-1] * sigma**2)
    keys = xp.asarray(features(noisy, scale)).astype(dtype)
    values = xp.asarray(noisy.reshape(-1, noisy.shape[-1])).astype(dtype)
    # From the rounded keys, so that a key's distance to itself is 0 whatever the dtype.
    norms = xp.square(keys.astype(xp.float32)).sum(axis=-1)
    bias = -0.5 * scale * norms[None, :]
    out = xp.empty(values.shape, xp.float32)

    # Compiles the kernel, or reads it from the cache; not part of the time.
    attention(keys[:1], keys, values, bias, scale=scale, return_lse=True)
    sync()
    start = time.perf_counter()
    with tqdm(total=len(keys), unit="pixel", disable=quiet, unit_scale=True) as progress:
        for i in range(0, len(keys), chunk):
            part = slice(i, i + chunk)
            mean, lse = attention(keys[part], keys, values, bias, scale=scale, return_lse=True)
            out[part] = _weigh_own_less(xp, mean, values[part], -bias[0, part] - lse)
            sync()
            progress.update(len(mean))
    seconds = time.perf_counter() - start

    image = (out if xp is np else xp.asnumpy(out)).reshape(noisy.shape).clip(0.0, 1.0)
    work = 2.0 * len(keys) ** 2 * (keys.shape[1] + values.shape[1])
    return Result(image, keys.shape, values.shape, str(keys.dtype), seconds, work / seconds / 1e12)


def _weigh_own_less(xp: Any, mean: Any, own: Any, log_weight: Any) -> Any:
    """Take most of the pixel's own weight out of its mean.

    A patch is at distance 0 from itself but never from its equals, whose noise differs; left
    alone, a pixel would mostly keep its own noise. The LSE says what it weighed: the score of a
    key with itself is ``-bias``, its weight ``exp(-bias - lse)``.
    """
    weight = xp.exp(log_weight)[:, None]
    others = 1.0 - weight
    # The constant keeps a patch without equals, whose `others` is rounding error, as it is.
    less = xp.minimum(weight, _OWN_WEIGHT * others + 0.02)
    return (mean.astype(xp.float32) + (less - weight) * own) / (others + less)


def psnr(image: Image, original: Image) -> float:
    """Return the peak signal-to-noise ratio in dB of `image`, with its values cut to [0, 1]."""
    return -10.0 * math.log10(float(np.mean((image.clip(0.0, 1.0) - original) ** 2)))


def _cupy(device: str) -> Any:
    """Return CuPy for a run on the GPU, or None for one on the CPU."""
    if device == "cpu":
        return None
    from fa_cupy.gpu.driver import devices

    found, why = devices.look()
    if found:
        return devices.import_cupy()[0]
    if device == "gpu":
        hint = ": pip install 'fa_cupy[cuda13]' (or cuda12)" if why == devices.ABSENT else ""
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
    height = options.size or (None if cupy else CPU_HEIGHT)
    original = photograph(height)
    _check_output(options.output)
    rng = np.random.default_rng(0)
    noise = options.sigma * rng.standard_normal(original.shape, dtype=np.float32)
    noisy = original + noise

    rows, columns, _ = original.shape
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if cupy:
        device = cupy.cuda.Device()
        name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
        where = {"xp": cupy, "dtype": "float16", "chunk": 1 << 15, "sync": device.synchronize}
    else:
        name, where = f"CPU, {threads} threads", {}
    print(f"device      {name}")
    print(f"photograph  {columns} x {rows}, {rows * columns:,} pixels")
    result = denoise(noisy, options.sigma, **where)

    before, after = psnr(noisy, original), psnr(result.image, original)
    print(f"attention   q, k {result.q_shape}, v {result.v_shape}, {result.dtype}")
    print(f"time        {result.seconds:.3g} s, {result.tflops:.3g} TFLOP/s")
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
        "--size",
        type=_rows,
        metavar="ROWS",
        help=f"reduce the photograph to this height (CPU: {CPU_HEIGHT}; GPU: the whole of it)",
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
    except BrokenPipeError:  # whoever reads the output has enough of it
        raise
    except (DemoError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0
