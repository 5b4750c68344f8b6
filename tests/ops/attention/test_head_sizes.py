"""resize_heads: the kernel (in Triton's interpreter on a CPU) and plain torch give what padding and slicing give."""

import itertools

import pytest
import torch
from torch.nn.functional import pad

from opslot._base.errors import KernelError
from opslot.ops.attention import head_sizes
from opslot.ops.attention.flash import make_flash
from opslot.ops.attention.head_sizes import resize_heads
from opslot.ops.attention.widths import padded_widths

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def heads(shape, layout="contiguous"):
    """A tensor [B, S, heads, D] or [S, heads, D] in one of several memory layouts."""
    *lead, tokens, count, width = shape
    if layout == "heads first":
        return torch.randn(*lead, count, tokens, width, device=DEVICE).transpose(-3, -2)
    if layout == "part of a projection":
        return torch.randn(*lead, tokens, 3, count, width, device=DEVICE).select(-3, 1)
    if layout == "strided channels":
        return torch.randn(*lead, tokens, width, count, device=DEVICE).transpose(-2, -1)
    if layout == "expanded":
        return torch.randn(width, device=DEVICE).expand(shape)
    return torch.randn(shape, device=DEVICE)


LAYOUTS = ("contiguous", "heads first", "part of a projection", "strided channels", "expanded")
SIZES = {
    "padded": ([(2, 5, 4, 72)] * 3, (96, 96, 96)),
    "cut": ([(37, 3, 40)] * 3, (24, 24, 24)),
    "grouped heads, narrower values": ([(1, 70, 6, 36), (1, 70, 2, 36), (1, 70, 2, 20)], (64, 64, 40)),
    "one stays": ([(2, 5, 4, 64), (2, 5, 2, 40), (2, 5, 2, 40)], (64, 64, 64)),
    "other lengths of keys": ([(2, 3, 4, 17), (2, 9, 2, 17), (2, 9, 2, 17)], (32, 32, 32)),
    "one tensor": ([(2, 5, 4, 96)], (72,)),
    "no tokens": ([(0, 4, 72)] * 3, (96, 96, 96)),
}


def resized(x, width):
    return pad(x, (0, width - x.shape[-1])) if width > x.shape[-1] else x[..., :width]


@pytest.mark.quick("*-contiguous-True", "grouped heads*", "one tensor-*-False")
@pytest.mark.parametrize("with_kernel", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shapes", "widths"), SIZES.values(), ids=SIZES)
def test_equals_padding_and_slicing(monkeypatch, shapes, widths, layout, with_kernel):
    if not with_kernel:
        monkeypatch.setattr(head_sizes, "runs_triton", lambda x: False)
    tensors = [heads(shape, layout).requires_grad_() for shape in shapes]
    found = resize_heads(tensors, widths)
    expected = [resized(x, width) for x, width in zip(tensors, widths, strict=True)]
    douts = [heads(x.shape, layout) for x in expected]
    gradients = [torch.autograd.grad(outs, tensors, douts) for outs in (found, expected)]
    for got, want in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        assert torch.equal(got, want)
    assert all(x.is_contiguous() for x, before in zip(found, tensors, strict=True) if x is not before)


@pytest.mark.parametrize("frozen", [0, 2])
def test_tensors_without_gradient(frozen):
    tensors = [torch.randn(3, 2, 40, device=DEVICE, requires_grad=i != frozen) for i in range(3)]
    q, _, v = resize_heads(tensors, (64, 64, 64))
    (q.square().sum() + v.square().sum()).backward()
    for i, x in enumerate(tensors):
        # The second has no gradient, since it is not used.
        assert (x.grad is None) == (i in (1, frozen))
        if x.grad is not None:
            torch.testing.assert_close(x.grad, 2 * x)


def test_equal_sizes_are_not_copied():
    tensors = [torch.randn(3, 2, 64, requires_grad=True) for _ in range(3)]
    assert all(x is y for x, y in zip(resize_heads(tensors, (64,) * 3), tensors, strict=True))


def test_one_launch_for_queries_keys_and_values(monkeypatch):
    kernels = pytest.importorskip("opslot.ops._common.kernels.heads")
    launches = []
    launch = kernels._launch
    monkeypatch.setattr(kernels, "_launch", lambda grid, *rest: launches.append(grid) or launch(grid, *rest))
    tensors = [torch.randn(1, 6, count, 40, device=DEVICE, requires_grad=True) for count in (4, 2, 2)]
    outs = resize_heads(tensors, (64, 64, 64))
    assert [grid[1] for grid in launches] == [3]
    # The gradients are views.
    sum(x.sum() for x in outs).backward()
    assert [grid[1] for grid in launches] == [3]
    sum(x.sum() for x in resize_heads(tensors, (24, 24, 24))).backward()
    assert [grid[1] for grid in launches] == [3, 3, 3]


def test_compiles_with_fullgraph():
    tensors = [torch.randn(2, 6, count, 40, device=DEVICE, requires_grad=True) for count in (4, 2, 2)]

    def loss(*tensors):
        q, k, v = resize_heads(tensors, (64, 64, 48))
        return resize_heads([q * 2.0], (40,))[0].square().sum() + (k * k).sum() + v.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, want in zip(*(torch.autograd.grad(f(*tensors), tensors) for f in (compiled, loss)), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_compiles_without_gradients(count):
    tensors = [torch.randn(2, 6, 2, 40, device=DEVICE) for _ in range(count)]
    compiled = torch.compile(resize_heads, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(tensors, [64] * count), resize_heads(tensors, [64] * count))


def test_second_derivative_raises():
    x = torch.randn(3, 2, 40, device=DEVICE, requires_grad=True)
    out = resize_heads([x], (64,))[0].square().sum()
    with pytest.raises(KernelError, match="no second derivative"):
        torch.autograd.grad(out, x, create_graph=True)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [40, 72, 80, 112])
def test_flash_attention_4_with_padded_heads_on_a_gpu(width):
    pytest.importorskip("flash_attn.cute")
    flash = make_flash(4)
    q, k, v = (torch.randn(1, 4, 640, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    boundaries = torch.tensor([0, 256, 384, 640], dtype=torch.int32, device="cuda")
    module = torch.nn.Module()
    module.is_causal = False
    options = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
    out, _ = flash(module, q, k, v, None, **options)
    assert out.is_contiguous()
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), dout)

    def exact(q, k, v):
        spans = itertools.pairwise(boundaries.tolist())
        parts = [[x[:, :, a:b] for x in (q, k, v)] for a, b in spans]
        return torch.cat([torch.softmax(q @ k.mT * width**-0.5, -1) @ v for q, k, v in parts], 2).transpose(1, 2)

    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = exact(*leaves)
    wanted = torch.autograd.grad(expected, leaves, dout.double())
    for got, want in zip((out, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2**-5, atol=2**-6)


def test_head_sizes_of_flash_attention_4():
    assert padded_widths(4, 192, 128) == (192, 128)
    # Without kernels of 192 for grouped heads.
    assert padded_widths(4, 192, 128, grouped=True) == (256, 256)
    assert padded_widths(4, 96, 128, grouped=True) == (128, 128)
