"""The demo denoises, and says in one line what is missing."""

import builtins
import io
import re

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from fa_cupy import plot
from fa_cupy.cli import demo


def noisy_photograph(height, sigma):
    original = demo.photograph(height)
    noise = np.random.default_rng(0).standard_normal(original.shape, dtype=np.float32)
    return original, original + sigma * noise


@pytest.mark.parametrize("sigma", [0.05, 0.1, 0.2])
def test_denoising_gains_what_it_claims(sigma):
    original, noisy = noisy_photograph(96, sigma)
    result = demo.denoise(noisy, sigma)
    assert result.image.shape == original.shape
    assert result.image.dtype == np.float32
    assert demo.psnr(result.image, original) >= demo.psnr(noisy, original) + 3.0
    assert result.seconds > 0
    assert result.tflops > 0


def test_float16_denoises_as_well():
    original, noisy = noisy_photograph(64, 0.1)
    full = demo.denoise(noisy, 0.1).image
    half = demo.denoise(noisy, 0.1, dtype=np.float16).image
    assert demo.psnr(half, original) == pytest.approx(demo.psnr(full, original), abs=0.05)


def test_a_first_call_is_not_timed():
    """Where there is a device, and it is waited for before and after the second one."""
    _, noisy = noisy_photograph(24, 0.1)
    waits = []
    one = demo.denoise(noisy, 0.1).image
    np.testing.assert_array_equal(demo.denoise(noisy, 0.1, sync=lambda: waits.append(1)).image, one)
    assert len(waits) == 2
    demo.denoise(noisy, 0.1, reach=None)


@pytest.mark.parametrize("reach", [0, 2, 50])
def test_pairs_are_counted(reach):
    y, x = np.indices((7, 9)).reshape(2, -1)
    near = (abs(np.subtract.outer(y, y)) <= reach) & (abs(np.subtract.outer(x, x)) <= reach)
    assert demo.pairs_within(reach, 7, 9) == near.sum()
    assert demo.pairs_within(None, 7, 9) == 63**2


def test_psnr():
    assert demo.psnr(np.full((2, 2, 3), 0.5), np.full((2, 2, 3), 0.6)) == pytest.approx(20.0)


def test_the_command_writes_a_picture(tmp_path, capsys):
    path = tmp_path / "demo.png"
    assert demo.main(["--device", "cpu", "--size", "48", "-o", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    for line in ("device", "photograph", "attention", "time", "GFLOP/s", "PSNR", "picture"):
        assert line in said
    assert float(re.search(r"([+-][\d.]+) dB\n", said)[1]) >= 3.0


# The largest error of each; float64 is what others are held against.
COSTS = {"float16": 1e-3, "bfloat16": 1e-2, "float32": 1e-6, "float64": None}


@pytest.mark.parametrize("dtype", COSTS)
def test_what_a_dtype_costs(dtype, tmp_path, capsys):
    command = ["--device", "cpu", "--size", "32", "-o", str(tmp_path / "demo.png")]
    assert demo.main([*command, "--dtype", dtype]) == 0
    said = capsys.readouterr().out
    assert f"to 23 x 23, {dtype}\n" in said
    error = re.search(r"^error {7}(.*)$", said, re.MULTILINE)[1]
    if COSTS[dtype] is None:
        assert error == "what the others are held against"
    else:
        assert error.endswith(" from float64")
        assert COSTS[dtype] / 30 < float(error.split()[0]) < COSTS[dtype]
    half = re.search(r"^float16 .*FLOP/s, (\S+) from float64\n +(\S+) takes", said, re.MULTILINE)
    if dtype in ("float16", "bfloat16"):
        assert half is None
    else:
        assert float(half[1]) == pytest.approx(2.3e-4, rel=0.5)
        assert half[2] == dtype


def test_a_run_in_no_other_dtype(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--dtype", "int8"])
    assert "invalid choice: 'int8'" in capsys.readouterr().err
    assert demo.main(["--device", "cpu", "--size", "8", "-o", str(tmp_path / "a.png")]) == 0
    said = capsys.readouterr().out
    assert "float32\n" in said
    assert "error" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "nowhere/demo.png"], "there is no folder nowhere"),
        (["-o", "demo.nothing"], "its name must end in"),
        (["-o", "folder.png"], "folder of that name"),
    ],
)
def test_a_picture_that_cannot_be_written(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    assert demo.main(["--device", "cpu", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("size", ["0", "-4", "1.5", "many"])
def test_sizes_that_make_no_sense(size, capsys):
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--size", size])
    assert f"--size: {size} is not a whole number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("sigma", ["-1", "0", "1e-320", "1e-30", "1e30", "inf", "nan", "some"])
def test_noise_that_makes_no_sense(sigma, capsys):
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--size", "8", "--sigma", sigma])
    assert f"--sigma: {sigma} is not a number from 0.001 to 10.0" in capsys.readouterr().err


@pytest.mark.parametrize("sigma", demo._SIGMAS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_least_and_the_most_noise(sigma, dtype):
    original, noisy = noisy_photograph(40, sigma)
    image = demo.denoise(noisy, sigma, dtype=dtype).image
    assert demo.psnr(image, original) >= demo.psnr(noisy, original) - 0.5


def hide(monkeypatch, *names):
    """Make imports of these modules fail as if they were not installed."""
    real = builtins.__import__

    def missing(name, *rest, **options):
        if name.partition(".")[0] in names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", missing)


def test_without_matplotlib(monkeypatch, capsys):
    hide(monkeypatch, "matplotlib")
    assert demo.main(["--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("demo: needs matplotlib")
    assert "pip install" in error
    assert error.count("\n") == 1


def test_without_cupy(monkeypatch, capsys):
    hide(monkeypatch, "cupy")
    assert demo.main(["--device", "gpu"]) == 1
    assert "CuPy is not installed" in capsys.readouterr().err
    assert demo._cupy("auto") is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, *COSTS])
def test_the_command_on_a_gpu(dtype, tmp_path, capsys):
    path = tmp_path / "demo.png"
    chosen = [] if dtype is None else ["--dtype", dtype]
    assert demo.main(["--device", "gpu", "-o", str(path), *chosen]) == 0
    said = capsys.readouterr().out
    assert f"to 23 x 23, {dtype or 'float16'}\n" in said
    if COSTS.get(dtype):
        assert float(re.search(r"^error +(\S+)", said, re.MULTILINE)[1]) < COSTS[dtype]
    assert "307,200 pixels" in said
    assert "to the whole picture" in said
    assert float(re.search(r"([+-][\d.]+) dB\n", said)[1]) >= 3.0
    assert path.exists()


def test_weights_draw_what_is_seen():
    ax = plot.weights(3, 5, is_causal=True, causal_align="bottom_right")
    drawn = ax.collections[0].get_array()
    assert (~np.ma.getmaskarray(drawn) == np.tri(3, 5, 2, dtype=bool)).all()
    empty = plot.weights(2, 2, mask=np.zeros((2, 2), bool)).collections[0].get_array()
    assert np.ma.getmaskarray(empty).all()
    assert plot.weights(3, 0).collections[0].get_array().size == 0
    with pytest.raises(
        TypeError, match=r"^plot\.weights: k_len is 2.0 \(float\), want an int >= 0"
    ):
        plot.weights(3, 2.0)
    with pytest.raises(
        ValueError, match=r"^plot\.images: panels is empty, want at least one image"
    ):
        plot.images({}, io.BytesIO())


def test_images_cuts_values_and_loses_no_pixel(tmp_path):
    import PIL.Image

    panels = {"a": np.full((30, 500, 3), 1.5), "b": np.full((30, 500, 3), -0.5)}
    plot.images(panels, tmp_path / "two.png")
    with PIL.Image.open(tmp_path / "two.png") as picture:
        assert picture.width >= 1000
