"""Models modify the outputs of linear layers in place, as Gemma 3n does."""

import pytest
import torch
from torch.nn import functional as F

from opslot.ops.linear import aligned, fp8, low_rank

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("width", [48, 45])
@pytest.mark.parametrize(
    "linear",
    [
        pytest.param(aligned.standard, id="aligned"),
        pytest.param(lambda x, weight: low_rank.linear(x, weight.detach(), None, None), id="low rank"),
    ],
)
def test_output_can_be_modified(linear, width, monkeypatch):
    monkeypatch.setattr(aligned, "_SMALL", 8)
    x = torch.randn(2, 8, 16, device=DEVICE, requires_grad=True)
    weight = torch.randn(width, 16, device=DEVICE)
    out = linear(x, weight)
    out *= 3.0
    expected = F.linear(x, weight) * 3.0
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(expected)
    torch.testing.assert_close(torch.autograd.grad(out, x, dout), torch.autograd.grad(expected, x, dout))


def test_output_in_fp8_can_be_modified():
    x, weight = (torch.randn(rows, 16, device=DEVICE, requires_grad=True) for rows in (32, 48))
    out, expected = fp8.standard(x[None], weight), fp8.standard(x[None], weight) * 3.0
    out *= 3.0
    assert torch.equal(out, expected)
    assert torch.equal(*[torch.autograd.grad(y.square().sum(), weight)[0] for y in (out, expected)])
