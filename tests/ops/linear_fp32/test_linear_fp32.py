"""linear_fp32: the matmuls of bfloat16 are as precise as those of float32 copies."""

import pytest
import torch

from opslot._base.errors import KernelError
from opslot.models.discovery import discover
from opslot.ops.linear_fp32 import op, torch_mm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(lead=(2, 33), width=256, outputs=16):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*lead, width, generator=generator).to(DEVICE, torch.bfloat16).requires_grad_()
    weight = torch.randn(outputs, width, generator=generator).to(DEVICE, torch.bfloat16).requires_grad_()
    # Of different sizes, as the gradients of a router's logits are.
    dout = torch.randn(*lead, outputs, generator=generator).exp().to(DEVICE)
    return x, weight, dout


def exact(x, weight, dout):
    leaves = [t.detach().double().requires_grad_() for t in (x, weight)]
    out = op.standard(*leaves)
    assert out.dtype == torch.float64
    return out, *torch.autograd.grad(out, leaves, dout.double())


def test_gradients_are_rounded_once():
    x, weight, dout = inputs()
    out = torch_mm.standard(x, weight)
    assert out.dtype == torch.float32
    found = out, *torch.autograd.grad(out, (x, weight), dout)
    expected = exact(x, weight, dout)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-5, atol=1e-4)
    for got, wanted in zip(found[1:], expected[1:], strict=True):
        assert got.dtype == torch.bfloat16
        # The spacing of bfloat16 numbers: half of it by rounding the result, the rest where that is a tie.
        assert ((got - wanted).abs() <= 2.0**-8 * wanted.abs() * 1.01 + 1e-4).all()
        once = (wanted.bfloat16() == got).float().mean()
        assert once > 0.99


def test_a_gradient_rounded_to_bfloat16_would_be_found():
    x, weight, dout = inputs()
    wanted = exact(x, weight, dout)[1].bfloat16()
    rounded = (dout.bfloat16() @ weight).detach()
    assert (wanted == rounded).float().mean() < 0.9


@pytest.mark.parametrize("trained", [0, 1])
def test_only_the_gradient_that_is_needed_is_computed(trained):
    x, weight, dout = inputs()
    leaves = [t.detach().requires_grad_(i == trained) for i, t in enumerate((x, weight))]
    torch_mm.standard(*leaves).backward(dout)
    assert [leaf.grad is not None for leaf in leaves] == [trained == 0, trained == 1]


def test_hidden_states_in_float32_and_autocast_as_in_eager():
    x, weight, _ = inputs()
    assert torch.equal(torch_mm.standard(x.float(), weight), op.standard(x.float(), weight))
    with torch.autocast(DEVICE, torch.bfloat16):
        found, expected = torch_mm.standard(x, weight), op.standard(x, weight)
    assert found.dtype == expected.dtype == torch.bfloat16


def test_a_weight_in_float32_is_an_error():
    x, weight, _ = inputs()
    with pytest.raises(KernelError, match=r"torch_mm' cannot take weight: its dtype is torch.float32"):
        torch_mm.standard(x, weight.float())


@pytest.mark.parametrize("arch", ["deepseek_v3", "glm4_moe", "ernie4_5_moe", "longcat_flash"])
def test_routers_in_float32_are_found(arch):
    assert "linear_fp32/standard" in map(str, discover(arch).matches)


def test_routers_in_the_models_dtype_are_not():
    assert "linear_fp32/standard" not in map(str, discover("qwen3_moe").matches)
