"""causal_conv1d: cases that the parity harness does not cover."""

import itertools

import pytest
import torch

import opslot
from opslot import KERNEL_REGISTRY
from opslot._base.device import DeviceFacts
from opslot._base.errors import ConfigError, KernelError
from opslot.ops.causal_conv1d import op
from opslot.slots import KernelRequest, OpSlot

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = ["triton", "torch_packed"]


def load(name):
    return KERNEL_REGISTRY.load("causal_conv1d", "standard", name)


def inputs(length, channels=24, width=4, batch=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, length, channels), (channels, width), (channels,))
    x, weight, bias = (torch.randn(s, generator=generator).to(DEVICE, dtype).requires_grad_() for s in shapes)
    return x, weight, bias


def cumulative(documents, dtype=torch.int32):
    return torch.tensor([0, *documents], device=DEVICE).cumsum(0).to(dtype)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_auto_selects_the_measured_kernel_on_a_gpu(dtype, capability):
    pytest.importorskip("triton")
    request = KernelRequest("causal_conv1d", "standard", DeviceFacts("gpu", capability), dtype)
    assert KERNEL_REGISTRY.resolve(request).chosen == "triton"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_equals_transformers_bit_for_bit(dtype):
    upstream = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    if not hasattr(upstream, "causal_conv1d_fn") or upstream.causal_conv1d_fn is None:
        pytest.skip("this Transformers has the convolution inside the module")
    x, weight, bias = inputs(19, dtype=dtype)
    expected = upstream.causal_conv1d_fn(x.transpose(1, 2), weight, bias, activation="silu")
    assert torch.equal(op.reference(x.transpose(1, 2), weight, bias, "silu"), expected)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", KERNELS)
def test_packed_documents_equal_separate_documents(name, index):
    documents = [1, 6, 0, 2, 70, 3]
    x, weight, bias = inputs(sum(documents))
    kernel = load(name)
    packed = kernel(x.transpose(1, 2), weight, bias, "silu", cumulative(documents, index))
    bounds = list(itertools.accumulate(documents, initial=0))
    alone = [kernel(x[:, a:b].transpose(1, 2), weight, bias, "silu") for a, b in itertools.pairwise(bounds) if b > a]
    dout = torch.randn_like(packed)
    found = torch.autograd.grad(packed, (x, weight, bias), dout)
    expected = torch.autograd.grad(torch.cat(alone, -1), (x, weight, bias), dout)
    torch.testing.assert_close(packed, torch.cat(alone, -1), rtol=0, atol=1e-6)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", KERNELS)
def test_documents_are_independent(name):
    x, weight, bias = inputs(20)
    kernel, cu_seqlens = load(name), cumulative([9, 11])
    other = x.detach().clone()
    other[:, :9] = 5.0
    out = [kernel(each.transpose(1, 2), weight, bias, "silu", cu_seqlens)[..., 9:] for each in (x, other)]
    assert torch.equal(out[0], out[1])


def test_blocks_of_a_long_sequence_are_joined():
    """Every boundary between two Triton programs, forward and backward."""
    x, weight, bias = inputs(200)
    found = load("triton")(x.transpose(1, 2), weight, bias, "silu")
    expected = op.reference(x.transpose(1, 2).double(), weight.double(), bias.double(), "silu")
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    dout = torch.randn_like(found)
    for got, want in zip(
        torch.autograd.grad(found, (x, weight), dout),
        torch.autograd.grad(expected, (x, weight), dout.double()),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("layout", ["expanded", "sequence last", "every second channel"])
def test_gradients_with_any_layout(layout):
    x, weight, bias = inputs(12, batch=2)
    dout = {
        "expanded": torch.ones((), device=DEVICE).expand(2, 24, 12),
        "sequence last": torch.randn(2, 24, 12, device=DEVICE),
        "every second channel": torch.randn(2, 12, 48, device=DEVICE)[..., ::2].transpose(1, 2),
    }[layout]
    found, expected = (
        torch.autograd.grad(kernel(x.transpose(1, 2), weight, bias, "silu"), (x, weight, bias), dout)
        for kernel in (load("triton"), op.reference)
    )
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["strided", "expanded"])
def test_bias_with_any_layout(layout):
    x, weight, bias = (t.detach() for t in inputs(9))
    bias = bias.repeat_interleave(2)[::2] if layout == "strided" else bias[:1].expand(24)
    arguments = (x.transpose(1, 2), weight, bias.requires_grad_())
    expected = op.reference(*arguments, "silu")
    found = load("triton")(*arguments, "silu")
    torch.testing.assert_close(found, expected)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), bias)
    (found_grad,) = torch.autograd.grad(found.square().sum(), bias)
    torch.testing.assert_close(found_grad, expected_grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KERNELS)
def test_tokens_after_the_last_document_raise(name):
    """They could be the states of a cache before the tokens, which would shift all documents."""
    x, weight, bias = inputs(13)
    with pytest.raises(KernelError, match="cannot take cu_seqlens: it ends with 7 where there are 13 tokens"):
        load(name)(x.transpose(1, 2), weight, bias, "silu", cumulative([4, 3]))


@pytest.mark.parametrize("name", KERNELS)
def test_documents_in_several_rows_equal_documents_in_one(name):
    x, weight, bias = inputs(12, batch=2)
    found = load(name)(x.transpose(1, 2), weight, bias, "silu", cumulative([4, 8, 5, 7]))
    one_row = load(name)(x.reshape(1, 24, -1).transpose(1, 2), weight, bias, "silu", cumulative([4, 8, 5, 7]))
    assert torch.equal(found.transpose(1, 2).reshape(1, 24, -1), one_row.transpose(1, 2))


def test_output_keeps_the_memory_layout_of_the_input():
    x, weight, _ = inputs(7, batch=2)
    assert load("triton")(x.transpose(1, 2), weight).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("name", KERNELS)
def test_output_can_be_modified_in_place(name):
    x, weight, _ = inputs(7, batch=2)
    out = torch.nn.functional.silu(load(name)(x.transpose(1, 2), weight), inplace=True)
    expected = op.reference(x.transpose(1, 2), weight, activation="silu")
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (out, expected)))


def test_only_required_gradients_are_computed():
    x, weight, bias = inputs(9)
    kernel = load("triton")
    (only,) = torch.autograd.grad(kernel(x.transpose(1, 2), weight.detach(), None, "silu").sum(), x)
    both = torch.autograd.grad(kernel(x.transpose(1, 2), weight, None, "silu").sum(), (x, weight))
    assert torch.equal(only, both[0])
    (alone,) = torch.autograd.grad(kernel(x.detach().transpose(1, 2), weight.detach(), bias, "silu").sum(), bias)
    assert alone.shape == bias.shape


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"activation": "gelu"}, "activation"),
        ({"weight": torch.zeros(24, 5)}, "weight"),
        ({"weight": torch.zeros(23, 4)}, "weight"),
        ({"weight": torch.zeros(24, 4, dtype=torch.float64)}, "weight"),
        ({"bias": torch.zeros(23)}, "bias"),
        ({"hidden_states": torch.zeros(2, 24, 8), "cu_seqlens": torch.tensor([0, 8])}, "cu_seqlens"),
    ],
)
def test_invalid_arguments_raise_with_kernel_and_argument(change, argument):
    arguments = {"hidden_states": torch.zeros(1, 24, 8), "weight": torch.zeros(24, 4)} | change
    with pytest.raises(KernelError, match=f"causal_conv1d_implementation='triton' cannot take {argument}"):
        load("triton")(**arguments)


def test_filter_of_more_taps_names_the_kernel_that_takes_it():
    with pytest.raises(KernelError, match=r"(?s)not \(24, 1 to 4\).*use torch_packed or eager"):
        load("triton")(torch.zeros(1, 24, 8), torch.zeros(24, 5))
    assert load("torch_packed")(torch.zeros(1, 24, 8), torch.zeros(24, 5)).shape == (1, 24, 8)


def test_compiles_with_fullgraph():
    x, weight, bias = inputs(10)
    kernel = load("triton")
    compiled = torch.compile(
        lambda x: kernel(x.transpose(1, 2), weight, bias, "silu", cumulative([4, 6])),
        fullgraph=True,
        backend="aot_eager",
    )
    expected = kernel(x.transpose(1, 2), weight, bias, "silu", cumulative([4, 6]))
    assert torch.equal(compiled(x), expected)
    (got,) = torch.autograd.grad(compiled(x).square().sum(), x)
    (want,) = torch.autograd.grad(expected.square().sum(), x)
    assert torch.equal(got, want)


@pytest.mark.parametrize("documents", [None, [0, 0]])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("name", KERNELS)
def test_empty_input_gives_empty_output_and_zero_gradients(name, width, documents):
    x, weight, bias = inputs(0, width=width)
    out = load(name)(x.transpose(1, 2), weight, bias, "silu", documents and cumulative(documents))
    assert out.shape == (1, 24, 0)
    for grad, given in zip(torch.autograd.grad(out.sum(), (x, weight, bias)), (x, weight, bias), strict=True):
        assert torch.equal(grad, torch.zeros_like(given))


class Mixer(torch.nn.Module):
    """A module with a slot for the convolution."""

    causal_conv1d = OpSlot("causal_conv1d")

    def __init__(self, width, activation):
        super().__init__()
        self.conv1d = torch.nn.Conv1d(8, 8, width, groups=8)
        self.activation = activation


@pytest.mark.parametrize(
    ("width", "activation", "message"),
    [
        (5, "silu", "triton.* takes up to 4 taps, this module's filter has 5"),
        (4, "gelu", "its activation is 'gelu', not silu"),
    ],
)
def test_unsupported_filter_or_activation_raises_when_bound(width, activation, message):
    with pytest.raises(ConfigError, match=message):
        opslot.bind(Mixer(width, activation), {"causal_conv1d_implementation": "triton"})


def test_torch_serves_filters_of_any_width():
    model = Mixer(7, "silu")
    assert "torch_packed" in str(opslot.bind(model, {"causal_conv1d_implementation": "torch_packed"}))
    for capability in ((8, 0), (9, 0)):
        on_gpu = KernelRequest("causal_conv1d", "standard", DeviceFacts("gpu", capability), torch.bfloat16, model)
        assert KERNEL_REGISTRY.resolve(on_gpu).chosen == "torch_packed"
