"""Load-balancing loss: equal to Transformers, ties, masks, all layers in one launch, errors."""

import pytest
import torch

from opslot import KERNEL_REGISTRY
from opslot._base.device import CPU, DeviceFacts
from opslot._base.errors import KernelError
from opslot.ops.load_balancing_loss.op import OP
from opslot.slots import KernelRequest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("eager", "triton")


def load(name):
    if name == "eager":
        return OP.variant("standard").reference
    return KERNEL_REGISTRY.load("load_balancing_loss", "standard", name)


@pytest.fixture(params=NAMES[1:])
def name(request):
    return request.param


def logits(layers=3, rows=24, experts=8, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return tuple(torch.randn(rows, experts).to(DEVICE, dtype).requires_grad_() for _ in range(layers))


def gradients(kernel, layers, *arguments, factor=1.0):
    loss = kernel(layers, *arguments)
    return loss.detach(), *torch.autograd.grad(loss * factor, layers)


def assert_same(found, expected, rtol=1e-5, atol=1e-8):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol)


@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("masked", [False, True])
def test_equals_transformers(kernel, masked):
    upstream = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe").load_balancing_loss_func
    layers = logits()
    mask = torch.tensor([[1] * 12, [1] * 5 + [0] * 7], device=DEVICE) if masked else None
    found, expected = (gradients(k, layers, 8, 3, mask, factor=0.1) for k in (load(kernel), upstream))
    assert_same(found, expected)


@pytest.mark.parametrize("kernel", NAMES)
def test_dense_model_has_no_loss(kernel):
    assert load(kernel)(None) == 0
    assert load(kernel)([torch.zeros(2, 4)], 4) == 0


@pytest.mark.parametrize("kernel", NAMES)
def test_logits_without_num_experts_raise(kernel):
    with pytest.raises(KernelError, match="num_experts: None"):
        load(kernel)(logits())


def test_balanced_routing_is_the_minimum(name):
    """Uniform routing gives top_k; routing everything to the same k experts gives num_experts."""
    experts = 8
    turning = torch.stack([torch.arange(experts).roll(i) for i in range(experts)]).float().to(DEVICE) * 0.01
    assert load(name)((turning, turning), experts, 2).item() == pytest.approx(2.0, rel=1e-6)
    collapsed = torch.zeros(5, experts, device=DEVICE)
    collapsed[:, :2] = 50.0
    assert load(name)((collapsed,), experts, 2).item() == pytest.approx(8.0, rel=1e-6)


def test_equal_logits_select_exactly_top_k(name):
    """Any of several equal experts may be chosen, but exactly top_k: the loss of uniform probabilities is top_k."""
    for dtype in (torch.float32, torch.bfloat16):
        flat = torch.zeros(9, 16, dtype=dtype, device=DEVICE)
        assert load(name)((flat, flat), 16, 5).item() == pytest.approx(5.0, rel=1e-6)


def test_negative_and_extreme_logits_sort_as_numbers(name):
    """The Triton kernel orders by bit patterns: signs, zeros, large values and -inf must sort as numbers."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        row = torch.tensor([-3.0, float("-inf"), 2.5, -0.0, 1e-6, -60000.0, 7.0, 0.5], dtype=dtype, device=DEVICE)
        for top_k in (1, 2, 3, 4, 5):
            expected = load("eager")((row.float().repeat(3, 1),), 8, top_k)
            torch.testing.assert_close(load(name)((row.repeat(3, 1),), 8, top_k), expected, rtol=1e-5, atol=0)


def test_padding_is_ignored(name):
    short = logits(rows=10)
    padded = tuple(torch.cat((x, 100 * torch.randn(6, 8, device=DEVICE))).detach().requires_grad_() for x in short)
    mask = torch.tensor([[1] * 10 + [0] * 6], device=DEVICE)
    found, expected = gradients(load(name), padded, 8, 2, mask), gradients(load(name), short, 8, 2)
    assert_same(found[:1], expected[:1])
    for x, y in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(x[:10], y, rtol=1e-5, atol=1e-8)
        assert x[10:].count_nonzero() == 0


@pytest.mark.parametrize("layout", ["every other weight", "one weight for all"])
def test_strided_mask(name, layout):
    layers, weights = logits(rows=10), torch.rand(1, 20, device=DEVICE)
    weights = weights[:, ::2] if layout == "every other weight" else weights[:, :1].expand(1, 10)
    assert_same(*(gradients(load(n), layers, 8, 2, weights) for n in (name, "eager")))


def test_results_are_deterministic(name):
    layers = logits(rows=301)
    first, second = (gradients(load(name), layers, 8, 2) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_some_layers_without_gradient(name):
    layers = logits()
    frozen = (layers[0], layers[1].detach(), layers[2])
    found = torch.autograd.grad(load(name)(frozen, 8, 2), (layers[0], layers[2]))
    assert_same(found, gradients(load(name), layers, 8, 2)[1::2])


def test_compiles_with_fullgraph(name):
    if name == "triton" and DEVICE == "cpu":
        pytest.skip("the interpreter is not a target of torch.compile")
    mask = torch.ones(2, 12, device=DEVICE)
    kernel = load(name)
    compiled = torch.compile(lambda x: kernel(x, 8, 2, mask) * 0.5, fullgraph=True, backend="aot_eager")
    layers = logits()
    assert_same(gradients(compiled, layers), gradients(lambda x: kernel(x, 8, 2, mask) * 0.5, layers))


@pytest.mark.parametrize("masked", [False, True])
def test_opcheck(name, masked):
    load(name)
    layers = [x.detach() for x in logits(2)]
    weights = torch.ones(24, device=DEVICE) if masked else None
    tests = ("test_schema", "test_faketensor")
    op = torch.ops.opslot.load_balancing_loss
    torch.library.opcheck(op.default, (layers, weights, 2), test_utils=tests)
    op = torch.ops.opslot.load_balancing_loss_backward
    coefficients, grad = torch.rand(8, device=DEVICE), torch.ones((), device=DEVICE)
    torch.library.opcheck(op.default, (layers, weights, coefficients, grad), test_utils=tests)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((), 8, 2), "an empty tuple"),
        ((logits(1, dtype=torch.float64), 8, 2), "torch.float64, not float32"),
        ((logits(1), 7, 2), "num_experts: 7 beside"),
        ((logits(1), None, 2), "num_experts: None"),
        ((logits(1), 8, 9), "top_k: 9 of 8"),
        (((*logits(1), *logits(1, rows=3)), 8, 2), r"\(24, 8\).*\(3, 8\)"),
        ((logits(1), 8, 2, torch.ones(2, 3)), r"attention_mask: shape \(2, 3\)"),
    ],
)
def test_shape_mismatch_raises(name, arguments, words):
    with pytest.raises(KernelError, match=words) as caught:
        load(name)(*arguments)
    assert f"'{name}'" in str(caught.value)
    assert "load_balancing_loss_implementation" in str(caught.value)


def test_auto_selects_the_measured_kernel():
    for facts, chosen in ((CPU, "eager"), (DeviceFacts("gpu", (9, 0)), "triton")):
        request = KernelRequest("load_balancing_loss", "standard", facts, torch.bfloat16)
        assert KERNEL_REGISTRY.resolve(request).chosen == chosen
