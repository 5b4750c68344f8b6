import pytest
import torch
from torch import nn

import opslot
from opslot._base.device import DeviceFacts
from opslot.ops._common.aligned_rows import with_padding
from opslot.ops.linear import aligned
from opslot.ops.swiglu_mlp import triton as swiglu
from opslot.slots import KERNEL_REGISTRY, KernelRequest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = {}
        self.gate = nn.Linear(256, 300)
        self.down = nn.Linear(300, 256, bias=False)
        self.other = nn.Linear(256, 512)
        self.small = nn.Linear(300, 3)


def test_only_large_layers_of_unaligned_sizes_are_bound():
    model = _Net().to(DEVICE)
    opslot.bind(model, {"linear_implementation": "auto"})
    rows = [row for row in opslot.explain(model) if row.op == "linear"]
    assert {row.variant for row in rows} == {"unaligned"}
    assert {path for row in rows for path in row.modules} == {"gate", "down"}


@pytest.mark.parametrize(
    ("dtype", "kernel"), [(torch.bfloat16, "aligned"), (torch.float16, "aligned"), (torch.float32, "eager")]
)
def test_auto_selects_it_in_16_bits(dtype, kernel):
    facts = DeviceFacts("gpu", (9, 0), "NVIDIA H200")
    request = KernelRequest("linear", "unaligned", facts, dtype, nn.Linear(300, 256))
    assert KERNEL_REGISTRY.resolve(request, "auto").chosen == kernel


def test_an_mlp_copies_no_activations(monkeypatch):
    """The padding of the projections' outputs stays through the activation, and that of gradients too."""
    inputs, padded = [], aligned.with_padding

    def seen(x):
        rows = padded(x)
        assert rows.shape[1] % 4 == 0
        inputs.append((tuple(x.shape), rows.data_ptr() == x.data_ptr()))
        return rows

    monkeypatch.setattr(aligned, "with_padding", seen)
    gate, up, down = (nn.Linear(*sizes).to(DEVICE) for sizes in ((64, 45), (64, 45), (45, 64)))
    x = torch.randn(2, 8, 64, device=DEVICE, requires_grad=True)
    hidden = swiglu.standard(aligned.standard(x, gate.weight, gate.bias), aligned.standard(x, up.weight, up.bias))
    assert (hidden.shape, hidden.stride()) == ((2, 8, 45), (8 * 48, 48, 1))
    leaves = [x, gate.weight, up.bias, down.weight]
    # Not a sum, whose gradient has no memory of its own.
    found = torch.autograd.grad(aligned.standard(hidden, down.weight, down.bias).square().sum(), leaves)
    assert len(inputs) == 9
    assert all(is_shared for _, is_shared in inputs), inputs
    expected = down(nn.functional.silu(gate(x)) * up(x)).square().sum()
    for value, wanted in zip(found, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(value, wanted)


def test_padding_of_others_is_not_used():
    """A slice has the strides of rows with padding."""
    x = torch.full((6, 48), float("nan"), device=DEVICE)
    x[:, :45] = 1.0
    weight = torch.randn(16, 45, device=DEVICE)
    torch.testing.assert_close(aligned.standard(x[:, :45], weight), weight.sum(1).expand(6, 16))
    product = swiglu.standard(x[:, :45], x[:, :45])
    assert with_padding(product)[:, 45:].count_nonzero() == 0
