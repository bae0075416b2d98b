"""What of the sparse families runs without a GPU: their masks, on NumPy in place of CuPy."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from fa_cupy import BitMask, attention, layouts
from validation import cases, families, peers, report, sparse_backward, sparse_peers

FAMILIES = ("attention_sparse", "attention_bwd_sparse", "mask_pack", "mask_source")


@pytest.fixture(autouse=True)
def on_numpy(monkeypatch):
    """NumPy's namespace for CuPy's, and no torch."""
    found = peers.module

    def module(name):
        if name == "torch":
            raise peers.UnavailableError("torch is left out")
        names = {"cupy": "numpy", "cupyx.scipy.sparse": "scipy.sparse"}
        return found(names.get(name, name))

    monkeypatch.setattr(peers, "module", module)
    sparse_peers.drawn.cache_clear()
    yield
    sparse_peers.drawn.cache_clear()


def small(case):
    return dataclasses.replace(case, length=1536, heads=3)


@pytest.mark.parametrize("case", cases.ATTENTION_SPARSE, ids=lambda case: case.name)
def test_masks_are_what_the_check_takes_them_for(case):
    case = small(case)
    q, k, v, *made_of = sparse_peers.random_cupy(case, 1)
    mask = sparse_peers.bit_mask(case, tuple(made_of))
    rows = np.arange(case.length)
    dense = [sparse_peers.seen(case, tuple(made_of), head, rows) for head in range(case.heads)]
    if mask is None:
        assert np.all(dense)
    else:
        assert (np.broadcast_to(mask.to_dense(), np.shape(dense)) == dense).all()
    assert np.any(dense, axis=-1).all()  # every query sees something
    check = sparse_peers.masked_check(case, (q, k, v, *made_of))
    out = attention(q, k, v, mask=mask)
    assert check(out) < report.ERROR_LIMIT["bf16"]
    out[0, -1, -1] = 1
    assert check(out) > report.ERROR_LIMIT["bf16"]


@pytest.mark.parametrize("case", cases.ATTENTION_BWD_SPARSE, ids=lambda case: case.name)
def test_gradients_under_masks_are_looked_at(case):
    case = dataclasses.replace(small(case), length=768)
    arrays = sparse_backward.random_cupy(case, 1)
    check = sparse_backward.masked_check(case, arrays)
    result = sparse_backward.fa_cupy(case, arrays).run()
    assert check(result) < report.ERROR_LIMIT["bf16"]
    if case.mask.startswith("elements"):
        assert check(sparse_backward.fa_cupy_array(case, arrays).run()) == check(result)
    for i in range(3):
        wrong = [x.copy() for x in result]
        wrong[i][-1, -1, 5:9] += 1
        assert check(wrong) > report.ERROR_LIMIT["bf16"]


def test_masks_hide_what_their_names_say():
    shares = {}
    for case in map(small, cases.ATTENTION_SPARSE):
        arrays = sparse_peers.random_cupy(case, 1)
        mask = sparse_peers.bit_mask(case, arrays[3:])
        shares[case.mask] = 1.0 if mask is None else mask.density
    assert shares.pop("") == shares.pop("blocks 1.0") == 1
    tiles = 1536 // 128
    for density in (0.5, 0.25, 0.1):
        want = density + (1 - density) / tiles
        assert shares.pop(f"blocks {density}") == pytest.approx(want, abs=0.06)
    want = {"causal": 0.5, "window 1024": 0.445, "elements": 0.5, "elements heads": 0.5}
    for kind, share in want.items():
        assert shares.pop(kind) == pytest.approx(share, abs=0.002)
    assert 1 / 16 < shares.pop("documents 16") < 0.3
    assert not shares


def test_bands_by_options_and_by_masks_agree():
    for case in map(small, cases.ATTENTION_SPARSE):
        arrays = sparse_peers.random_cupy(case, 1)
        if case.mask.partition(" ")[0] not in ("causal", "window"):
            with pytest.raises(peers.UnavailableError):
                sparse_peers.fa_cupy_band(case, arrays)
            continue
        by_mask, by_option = (
            make(case, arrays).run().astype(np.float32)
            for make in (sparse_peers.fa_cupy, sparse_peers.fa_cupy_band)
        )
        np.testing.assert_allclose(by_mask, by_option, rtol=0.02, atol=0.005)


def test_packed_masks_are_looked_at():
    case = cases.MaskPack(256, 3)
    (mask,) = arrays = sparse_peers.random_masks(case, 1)
    assert mask.mean() == pytest.approx(0.5, abs=0.02)
    check = sparse_peers.pack_check(case, arrays)
    lists = BitMask.from_dense(mask).lists
    found = SimpleNamespace(
        partial_begin=lists.partial_begin, partial_end=lists.partial_begin[1:],
        partial=lists.partial, words=lists.words.copy(),
    )  # fmt: skip
    result = found, np.arange(3)
    assert check(result) == 0
    found.words[-1, -1, -1, -1] ^= 1
    assert check(result) == np.inf
    copy = sparse_peers.copy(case, arrays)
    assert check(copy.native(copy.run())) == 0
    assert layouts.unpack(lists.words[:1]).shape == (1, 128, 128)


@pytest.mark.parametrize("source", ["csr", "indices"])
def test_masks_from_sources_are_looked_at(source):
    case = cases.MaskSource(source, 300, 7)
    arrays = sparse_peers.random_source(case, 1)
    check = sparse_peers.source_check(case, arrays)
    made = [make(case, arrays).run() for make in families.FAMILIES["mask_source"].impls.values()]
    assert [check(mask) for mask in made] == [0, 0]
    assert check(~made[0]) == np.inf
    assert made[0].to_dense()[0].sum() == len(set(arrays[0][0]))


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_whole(name):
    family = families.FAMILIES[name]
    assert family.picture == "sparse"
    assert set(family.default_impls) <= set(family.impls)
    names = [case.name for case in family.cases]
    assert len(set(names)) == len(names)
    for case in family.cases:
        assert family.work(case) > 0
        assert case.name.split()[0] in report.ERROR_LIMIT
    rows = [
        {"family": name, "case": case.name, "impl": impl, "ms": 1.0, "value": 1.0, "error": 0.0,
         "unit": family.unit, "date": "now"}
        for case in family.cases
        for impl in family.impls
    ]  # fmt: skip
    assert report.wrong(rows) == []
    rows[0]["error"] = 1.0
    assert len(report.wrong(rows)) == 1
