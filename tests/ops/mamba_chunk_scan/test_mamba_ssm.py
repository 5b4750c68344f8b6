"""The kernels of mamba_ssm, with the package replaced."""

import importlib
import sys
import types

import pytest
import torch

from opslot._base.errors import KernelError
from opslot.ops.mamba_chunk_scan import op
from tests.ops.mamba_chunk_scan.inputs import OPTIONS, assert_same, draw_states, inputs


def test_mamba_ssm_gets_sequence_indices(monkeypatch):
    """With a function of that package's signature that computes the reference."""

    def combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, **rest):
        bounds = None
        if seq_idx is not None:
            assert seq_idx.dtype == torch.int32
            assert seq_idx.shape == x.shape[:2]
            bounds = torch.tensor([0, *seq_idx[0].unique_consecutive(return_counts=True)[1].cumsum(0).tolist()])
        return op.reference(x, dt, A, B, C, D, dt_bias, initial_states, cu_seqlens=bounds, **rest)

    vendor = types.ModuleType("mamba_ssm.ops.triton.ssd_combined")
    vendor.mamba_chunk_scan_combined = combined
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, vendor.__name__, vendor)
    monkeypatch.delitem(sys.modules, "opslot.ops.mamba_chunk_scan.mamba_ssm", raising=False)
    kernel = importlib.import_module("opslot.ops.mamba_chunk_scan.mamba_ssm").mamba_chunk_scan
    monkeypatch.delitem(sys.modules, "opslot.ops.mamba_chunk_scan.mamba_ssm")
    given = {n: t.detach() for n, t in inputs(10, batch=2).items()}
    offsets = torch.tensor([0, 3, 3, 10, 11, 20])
    assert torch.equal(
        kernel(**given, **OPTIONS, cu_seqlens=offsets), op.reference(**given, **OPTIONS, cu_seqlens=offsets)
    )
    options = OPTIONS | {"return_final_states": True, "initial_states": draw_states(2, 4, 16, 24)}
    for got, want in zip(kernel(**given, **options), op.reference(**given, **options), strict=True):
        assert torch.equal(got, want)
    with pytest.raises(KernelError, match="mamba_ssm' cannot take cu_seqlens: states of packed documents"):
        kernel(**given, return_final_states=True, cu_seqlens=offsets)


@pytest.fixture
def mamba_ssm_scan(monkeypatch):
    """mamba_ssm's scan of Mamba-1, with a function of that package's signature that computes Transformers' scan."""
    upstream = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    if not hasattr(upstream, "mamba_selective_scan"):
        pytest.skip("this release has no function of the scan")

    def scan(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False):
        assert B.shape[:3] == (u.shape[0], 1, A.shape[1])
        assert A.dtype == D.dtype == delta_bias.dtype == torch.float32
        flags = {"delta_softplus": delta_softplus, "return_last_state": return_last_state}
        return upstream.mamba_selective_scan(u, delta, A, B[:, 0], C[:, 0], D, z, delta_bias, **flags)

    vendor = types.ModuleType("mamba_ssm.ops.selective_scan_interface")
    vendor.selective_scan_fn = scan
    for name in ("mamba_ssm", "mamba_ssm.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, vendor.__name__, vendor)
    room = "opslot.ops.mamba_chunk_scan.mamba_ssm_selective"
    monkeypatch.delitem(sys.modules, room, raising=False)
    kernel = importlib.import_module(room).mamba_chunk_scan
    monkeypatch.delitem(sys.modules, room)
    return kernel


def test_mamba_ssm_scan_of_mamba_1(mamba_ssm_scan):
    given = inputs(10, batch=2, width=1, groups=1, state=3, columns=(3,))
    expected = op.reference(**given, dt_softplus=True, return_final_states=True)
    torch.testing.assert_close(mamba_ssm_scan(**given, dt_softplus=True), expected[0], atol=1e-5, rtol=0)
    with torch.no_grad():
        found = mamba_ssm_scan(**given, dt_softplus=True, return_final_states=True)
    assert_same([x.double() for x in found], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"cu_seqlens": torch.tensor([0, 3, 10])}, "cu_seqlens: it does not separate documents"),
        ({"initial_states": torch.zeros(1, 4, 1, 3)}, "initial_states: it starts from zeros"),
        ({"dt_softplus": False}, "dt_softplus: without it, steps below zero must be zero"),
        ({"dt_limit": (0.0, 1.0)}, "dt_limit: it has no limits"),
        ({"dt": torch.zeros(1, 10, 4)}, "dt: its dtype is torch.float32, x's is torch.float64"),
        ({"return_final_states": True}, "return_final_states: it has no gradient of the last states"),
    ],
)
def test_mamba_ssm_scan_of_mamba_1_raises_for_what_it_does_not_serve(mamba_ssm_scan, change, argument):
    with pytest.raises(KernelError, match=f"mamba_ssm' cannot take {argument}"):
        mamba_ssm_scan(**(inputs(10, width=1, groups=1, state=3, columns=(3,)) | {"dt_softplus": True} | change))
