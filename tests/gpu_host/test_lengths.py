"""Key lengths and pages of float32 and float64 on a stand-in of a device: what is launched."""

import dataclasses

import numpy as np
import pytest

import fa_cupy
from fa_cupy.core import attention_problem
from fa_cupy.gpu.kernels.attention.attention_params import MASK_LISTS, Traits
from fa_cupy.gpu.kernels.attention.full_precision import key_lengths, split_kv
from fa_cupy.gpu.kernels.attention.full_precision.fwd_fp32_sm90 import FwdFp32Sm90
from fa_cupy.gpu.kernels.forward import for_any_layout, make_plan
from tests.support import cupy_stand_in
from tests.support.cupy_stand_in import CAPTURE, owned
from tests.support.every_run import only
from tests.support.noting_launcher import NotingLauncher

SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
FP32, SM90 = ["attention_fwd_fp32"], ["attention_split_kv", "attention_fwd_fp32_sm90"]
FP64 = ["attention_fwd_fp64"]
CAUSAL = {"is_causal": True, "causal_align": "bottom_right"}
PAGE = 16


@pytest.fixture
def device():
    with cupy_stand_in.on_a_device():
        yield


def launches(call):
    """The kernels that a call launches, of which there may be others in between."""
    logged = len(CAPTURE.log)
    call()
    return [event[1] for event in CAPTURE.log[logged:] if event[0] == "launch"]


def arrays(dtype, q_len, dim=64, pages=False):
    """Queries, keys and values of two entries, and where the keys are."""
    q = owned(np.zeros((2, 4, q_len, dim), dtype))
    shape = (40, 2, PAGE, dim) if pages else (2, 2, 320, dim)
    keys = {"k_lengths": owned(np.array([7, 320]))}
    if pages:
        keys["page_table"] = owned(np.zeros((2, 320 // PAGE), np.int32))
    return (q, owned(np.zeros(shape, dtype)), owned(np.zeros(shape, dtype))), keys


@pytest.mark.parametrize("pages", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize(
    ("dtype", "q_len", "dim", "options", "names"),
    [
        (SINGLE, 1, 64, {}, FP32),
        (SINGLE, 70, 200, {"softcap": 2.0}, FP32),
        (SINGLE, 600, 128, CAUSAL, SM90),
        (SINGLE, 600, 128, {"precision": "tf32"}, SM90),
        (DOUBLE, 1, 64, CAUSAL, FP64),
        (DOUBLE, 70, 64, {}, FP64),
        (DOUBLE, 600, 256, {}, FP64),
    ],
)
def test_kernels_read_lengths(device, dtype, q_len, dim, options, names, pages):
    """Pages are copied to where rows follow each other; no mask is made."""
    given, keys = arrays(dtype, q_len, dim, pages)
    for _ in range(2):
        assert launches(lambda: fa_cupy.attention(*given, **keys, **options)) == names


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
def test_a_mask_hides_keys_where_there_is_one(device, dtype):
    given, keys = arrays(dtype, 70)
    mask = owned(np.ones((70, 320), bool))
    found = launches(lambda: fa_cupy.attention(*given, mask=mask, **keys))
    assert found[-1:] == (FP32 if dtype == SINGLE else FP64)
    assert len(found) > 1


def problem(batch=(3, 4), heads=None, lengths=None, dtype=SINGLE, **options):
    """A problem with lengths, and its traits."""
    q = np.zeros((*batch, 600, 64), dtype)
    k = np.zeros((*(batch if heads is None else heads), 300, 64), dtype)
    lengths = np.zeros(batch[:-1], np.int32) if lengths is None else lengths
    found = attention_problem.attention_problem(q, k, k, None, None, k_lengths=lengths, **options)
    return Traits(found, attention_problem.out_view(found, q.shape, q.strides))


def lengths_in(step, prefix="common"):
    """The numbers and the address that a launch gets for lengths, and the fields they are in."""
    told = np.ascontiguousarray(step.params[prefix]["mask"]).view(np.uint8)
    (field,) = (field for field, name in step.addresses.items() if name == "k_lengths")
    return told[: key_lengths.KEY_LENGTHS.itemsize].view(key_lengths.KEY_LENGTHS)[0], field


def test_what_launches_are_told():
    wide = np.zeros((3, 2), np.int64)[:, ::2].reshape(3)
    traits = problem(lengths=wide, **CAUSAL)
    splitting, main = make_plan(traits, NotingLauncher()).steps
    assert isinstance(main.variant, FwdFp32Sm90)
    assert main.variant.lengths
    assert splitting.variant.lengths
    own, field = lengths_in(main)
    assert field == "common.mask.partial_begin"
    assert (own["bytes"], own["band_from_end"], own["batch"].tolist()) == (8, 1, [2, *[0] * 5])
    assert splitting.addresses["k_lengths.start"] == "k_lengths"
    assert splitting.params["k_lengths"][0]["batch"].tolist() == [2, *[0] * 5]


@pytest.mark.parametrize(("heads", "is_split"), [((3, 1), True), ((1, 4), False), ((1, 1), False)])
def test_keys_that_entries_of_other_lengths_share_are_split_to_the_end(heads, is_split):
    splitting, _ = make_plan(problem(heads=heads), NotingLauncher()).steps
    assert isinstance(splitting.variant, split_kv.SplitKv)
    assert ("k_lengths.start" in splitting.addresses) == is_split


def test_which_problems_kernels_take():
    target = "sm_90a"
    found = problem().problem
    assert for_any_layout(found, target)
    many = problem(batch=(2, 1) * 4).problem
    assert for_any_layout(many, target)
    apart = dataclasses.replace(found, batch=(2,) * 7)
    assert not for_any_layout(apart, target)
    assert not for_any_layout(dataclasses.replace(found, k_len=0), target)
    assert not for_any_layout(dataclasses.replace(found, mask=found.q), target)


def test_the_struct_fits_in_place_of_a_mask():
    assert key_lengths.KEY_LENGTHS.itemsize <= MASK_LISTS.itemsize


@pytest.mark.parametrize("dtype", only([SINGLE, DOUBLE], SINGLE), ids=str)
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
def test_a_capture_takes_them(device, dtype, gradients):
    (q, k, v), keys = arrays(dtype, 70)
    lse = owned(np.zeros(q.shape[:-1], dtype))

    def call():
        if gradients:
            return fa_cupy.attention_backward(q, q, k, v, q, lse, **keys, **CAUSAL)
        return fa_cupy.attention(q, k, v, **keys, **CAUSAL)

    with CAPTURE.record():
        assert all("mask" not in name for name in launches(call))


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
def test_a_repeated_call_of_gradients_has_a_plan(device, monkeypatch, dtype):
    from fa_cupy.gpu import attention_backward  # which imports the stand-in of CuPy

    (q, k, v), keys = arrays(dtype, 70)
    lse = owned(np.zeros(q.shape[:-1], dtype))

    def call(**keys):
        return launches(lambda: fa_cupy.attention_backward(q, q, k, v, q, lse, **keys))

    names = call(**keys)
    monkeypatch.setattr(attention_backward, "backward", None)
    assert call(**keys) == names
    for other in (keys["k_lengths"][:1], keys["k_lengths"][::-1]):  # of other strides: a new one
        assert call(k_lengths=other) == names
