"""The kernels of other packages, with the packages replaced."""

import importlib
import sys
import types

import pytest
import torch

from opslot import KERNEL_REGISTRY
from opslot._base.device import DeviceFacts
from opslot._base.errors import KernelError
from opslot.ops.rms_norm import op
from opslot.slots import KernelRequest
from tests.ops.rms_norm.inputs import EPS, tensors


@pytest.fixture
def quack(monkeypatch):
    """`ops.rms_norm.quack` with a fake library that computes what its documentation says, in fp32."""
    calls = []

    def rmsnorm(x, weight=None, out_dtype=None, eps=1e-6, weight_offset=0.0):
        calls.append({"out_dtype": out_dtype, "weight_offset": weight_offset})
        scale = 1.0 if weight is None else weight.float() + weight_offset
        return (op.unweighted(x.float(), eps) * scale).to(out_dtype or x.dtype)

    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.rmsnorm", types.SimpleNamespace(rmsnorm=rmsnorm))
    monkeypatch.delitem(sys.modules, "opslot.ops.rms_norm.quack", raising=False)
    loaded = importlib.import_module("opslot.ops.rms_norm.quack")
    monkeypatch.delitem(sys.modules, "opslot.ops.rms_norm.quack")
    loaded.calls = calls
    return loaded


def test_quack_gets_the_dtype_and_offset_of_the_contract(quack):
    x, weight = torch.randn(3, 16, dtype=torch.bfloat16), torch.randn(16)
    assert quack.standard(x, weight, EPS).dtype == op.standard(x, weight, EPS).dtype == torch.float32
    assert quack.weight_offset(x, weight, EPS).dtype == torch.bfloat16
    assert quack.unweighted(x, EPS).dtype == torch.bfloat16
    assert quack.cast_after_weight(x, weight, EPS).dtype == torch.bfloat16
    assert [c["weight_offset"] for c in quack.calls] == [0.0, 1.0, 0.0, 0.0]
    wide = torch.randn(3, 16)
    torch.testing.assert_close(quack.standard(wide, weight, EPS), op.standard(wide, weight, EPS))
    torch.testing.assert_close(quack.weight_offset(wide, weight, EPS), op.weight_offset(wide, weight, EPS))
    torch.testing.assert_close(quack.cast_after_weight(wide, weight, EPS), op.cast_after_weight(wide, weight, EPS))
    torch.testing.assert_close(quack.unweighted(wide, EPS), op.unweighted(wide, EPS))


@pytest.mark.parametrize(
    ("x", "weight", "expected_message"),
    [
        (torch.zeros(2, 8, dtype=torch.float64), torch.zeros(8), "hidden_states: its dtype is torch.float64"),
        (torch.zeros(2, 8), torch.zeros(16), r"weight: its shape is \(16,\), not \(8,\)"),
        (torch.zeros(2, 12), torch.zeros(12), "12 elements, not a multiple of 8"),
    ],
)
def test_quack_unsupported_inputs_raise(quack, x, weight, expected_message):
    with pytest.raises(KernelError, match=expected_message) as caught:
        quack.standard(x, weight, EPS)
    assert "rms_norm_implementation='quack'" in str(caught.value)


@pytest.mark.parametrize(
    ("variant", "version", "width", "expected_message"),
    [
        ("weight_offset", "0.5.0", 64, "requires quack-kernels>=0.6.3, found 0.5.0"),
        ("weight_offset", "0.6.5", 64, None),
        ("standard", "0.5.0", 64, None),
        ("standard", "0.4.1", 64, "requires quack-kernels>=0.5, found 0.4.1"),
        ("standard", "0.6.5", 60, "requires a width that is a multiple of 8, found 60"),
    ],
)
def test_quack_requires_a_release_and_a_hidden_size(monkeypatch, variant, version, width, expected_message):
    monkeypatch.setattr("opslot.slots.spec.has_package", lambda name: True)
    monkeypatch.setattr("opslot.slots.spec.package_version", lambda name: version)
    module = types.SimpleNamespace(weight=torch.zeros(width))
    hopper, ampere = (DeviceFacts("gpu", capability) for capability in ((9, 0), (8, 0)))
    spec = KERNEL_REGISTRY.get("rms_norm", variant, "quack")
    assert spec.unsupported(KernelRequest("rms_norm", variant, hopper, torch.bfloat16, module)) == expected_message
    assert "9.0 or higher" in spec.unsupported(KernelRequest("rms_norm", variant, ampere, torch.bfloat16, module))


def test_npu_passes_the_argument_names_of_torch_npu(monkeypatch):
    def npu_rms_norm(x, gamma, epsilon):
        return op.standard(x, gamma, epsilon), None

    monkeypatch.setitem(sys.modules, "torch_npu", types.SimpleNamespace(npu_rms_norm=npu_rms_norm))
    monkeypatch.delitem(sys.modules, "opslot.ops.rms_norm.npu", raising=False)
    from opslot.ops.rms_norm import npu

    monkeypatch.delitem(sys.modules, "opslot.ops.rms_norm.npu")
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert torch.equal(npu.standard(x, weight, EPS), op.standard(x, weight, EPS))


@pytest.fixture
def fla(monkeypatch):
    """The adapter with a fake flash-linear-attention, which is not installed here."""

    def rms_norm_gated(x, g, weight, bias, activation="swish", residual=None, eps=1e-5):
        assert (bias, activation, residual) == (None, "swish", None)
        assert x.numel(), "fla divides by the number of its programs"
        return op.gated(x, weight, eps, g)

    for name in ("fla", "fla.modules"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(
        sys.modules, "fla.modules.fused_norm_gate", types.SimpleNamespace(rms_norm_gated=rms_norm_gated)
    )
    monkeypatch.delitem(sys.modules, "opslot.ops.rms_norm.fla", raising=False)
    loaded = importlib.import_module("opslot.ops.rms_norm.fla")
    monkeypatch.delitem(sys.modules, "opslot.ops.rms_norm.fla")
    return loaded


@pytest.mark.parametrize("rows", [0, 3])
def test_fla_gets_the_arguments_of_the_contract(fla, rows):
    x, weight, gate = tensors((rows, 16), (16,), (rows, 16))
    expected, found = op.gated(x, weight, EPS, gate), fla.gated(x, weight, EPS, gate)
    torch.testing.assert_close(found, expected)
    dout = torch.randn_like(found)
    grads = [torch.autograd.grad(out, (x, weight, gate), dout) for out in (found, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("width", "gate", "expected_message"),
    [(16385, (2, 16385), "16385 elements, the limit is 16384"), (8, (2, 4), "gate: its shape")],
)
def test_fla_unsupported_gates_raise(fla, width, gate, expected_message):
    with pytest.raises(KernelError, match=expected_message):
        fla.gated(torch.zeros(2, width), torch.zeros(width), EPS, torch.zeros(gate))
