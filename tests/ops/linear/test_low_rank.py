"""Linear layers with an adapter as one function, around frozen weights in NF4 or not."""

import contextlib
import copy
import gc
import pickle

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from opslot._base.errors import KernelError
from opslot.models._adapters.linear import fuse_linear_adapters
from opslot.ops.linear import aligned, low_rank
from opslot.ops.linear.nf4 import dequantize
from opslot.ops.swiglu_mlp.triton import standard as swiglu
from opslot.slots import OpsImplementationConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class MLP(nn.Module):
    def __init__(self, bias=False, activate=swiglu, width=40):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(24, width, bias=bias), nn.Linear(24, width, bias=bias)
        self.down_proj, self.activate = nn.Linear(width, 24, bias=bias), activate

    def forward(self, x):
        return self.down_proj(self.activate(self.gate_proj(x), self.up_proj(x)))


def adapted(model, ops=None, **changes):
    """The model with random adapters, with PEFT's forward and with the fused one."""
    targets = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    options = {"r": 3, "lora_alpha": 5, "target_modules": targets, "init_lora_weights": False} | changes
    model = inject_adapter_in_model(LoraConfig(**options), model).to(DEVICE)
    fused = copy.deepcopy(model)
    fuse_linear_adapters(fused, OpsImplementationConfig.make(ops))
    return model, fused


@pytest.fixture
def calls(monkeypatch):
    """The inputs of the fused function."""
    found, linear = [], low_rank.linear
    monkeypatch.setattr(low_rank, "linear", lambda x, *rest: (found.append(x), linear(x, *rest))[1])
    return found


def gradients(model, x, run=None):
    x = x.detach().requires_grad_()
    out = (run or model)(x)
    out.backward(torch.linspace(-1, 1, out.numel(), device=x.device).view(out.shape))
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return [out, x.grad, *trained.values()]


def check_equal(model, fused, x, **tolerances):
    expected, found = gradients(model, x), gradients(fused, x)
    assert len(found) == len(expected) > 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerances)


@pytest.mark.parametrize("shape", [(2, 5, 24), (24,), (0, 24)])
def test_equals_peft(calls, shape):
    torch.manual_seed(0)
    model, fused = adapted(MLP(bias=True))
    check_equal(model, fused, torch.randn(shape, device=DEVICE))
    assert len(calls) == 3
    assert repr(fused) == repr(model)


@pytest.mark.parametrize("create_graph", [False, True])
def test_pads_unaligned_sizes(calls, monkeypatch, create_graph):
    monkeypatch.setattr(aligned, "_SMALL", 8)
    torch.manual_seed(0)
    model, fused = adapted(MLP(bias=True, width=45, activate=swiglu if not create_graph else torch.mul))
    x = torch.randn(2, 5, 24, device=DEVICE)
    if not create_graph:
        check_equal(model, fused, x)
        assert [x.stride(-2) for x in calls] == [24, 24, 48]
        return
    x = x.double().requires_grad_()
    second = []
    for each in (model.double(), fused.double()):
        (first,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
        trained = [p for p in each.parameters() if p.requires_grad]
        second.append(torch.autograd.grad(first.square().sum(), [x, *trained]))
    for one, other in zip(*second, strict=True):
        torch.testing.assert_close(one, other)


def test_takes_a_strided_input(calls):
    torch.manual_seed(0)
    model, fused = adapted(MLP())
    check_equal(model, fused, torch.randn(24, 6, device=DEVICE).t())
    assert len(calls) == 3


def test_error_in_bfloat16_is_at_most_that_of_peft():
    torch.manual_seed(0)
    model, fused = adapted(nn.Sequential(nn.Linear(64, 96, bias=False)))
    x = torch.randn(256, 64, device=DEVICE)
    model, fused = model.bfloat16(), fused.bfloat16()
    exact = gradients(copy.deepcopy(model).double(), x.bfloat16().double())

    def errors(m):
        found = zip(gradients(m, x.bfloat16()), exact, strict=True)
        return [((one.double() - other).norm() / other.norm()).item() for one, other in found]

    assert all(found <= 1.1 * peft + 2**-9 for found, peft in zip(errors(fused), errors(model), strict=True))


@pytest.mark.parametrize(
    "change",
    [
        {"lora_dropout": 0.5},
        {"use_dora": True},
        {"lora_bias": True},
    ],
)
def test_other_adapters_keep_the_forward_of_peft(calls, change):
    _, fused = adapted(MLP(bias=True), **change)
    gradients(fused, torch.randn(5, 24, device=DEVICE))
    assert not calls


def test_conditions_of_a_call_keep_the_forward_of_peft(calls):
    torch.manual_seed(0)
    _, fused = adapted(MLP())
    x = torch.randn(5, 24, device=DEVICE)
    _, eager = adapted(MLP(), "eager")
    gradients(eager, x)
    with torch.autocast(DEVICE, torch.bfloat16):
        fused(x)
    assert not calls
    seen = []
    handle = fused.up_proj.lora_A["default"].register_forward_hook(lambda *_: seen.append(1))
    fused(x)
    handle.remove()
    assert (len(calls), len(seen)) == (2, 1)
    adapter = nn.ModuleList([fused.up_proj.lora_A, fused.up_proj.lora_B]).double()
    fused(x)
    assert len(calls) == 4
    adapter.float()
    with disabled_adapters(fused):
        fused(x)
    assert len(calls) == 4


def test_transforms_of_torch_func_keep_the_forward_of_peft():
    torch.manual_seed(0)
    model, fused = adapted(MLP(activate=lambda gate, up: torch.tanh(gate) * up))
    x = torch.randn(5, 24, device=DEVICE)
    expected, found = (torch.func.grad(lambda x, each=each: each(x).sum())(x) for each in (model, fused))
    torch.testing.assert_close(found, expected)
    expected, found = (torch.func.jvp(each, (x,), (x,))[1] for each in (model, fused))
    torch.testing.assert_close(found, expected)


@contextlib.contextmanager
def disabled_adapters(model):
    layers = [module for module in model.modules() if hasattr(module, "enable_adapters")]
    for layer in layers:
        layer.enable_adapters(False)
    yield
    for layer in layers:
        layer.enable_adapters(True)


def test_copies_keep_the_forward(calls):
    _, fused = adapted(MLP())
    x = torch.randn(5, 24, device=DEVICE)
    expected = fused(x)
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert torch.equal(other(x), expected)
    assert len(calls) == 9


def test_activations_are_computed_again_in_backward():
    """The input of down_proj is in memory after forward only where PEFT's forward keeps it."""
    torch.manual_seed(0)
    model, fused = adapted(MLP())
    check_equal(model, fused, torch.randn(7, 24, device=DEVICE))
    freed = []
    for each in (model, fused):
        found = []
        each.down_proj.register_forward_pre_hook(
            lambda _, args, found=found: found.append(StorageWeakRef(args[0].untyped_storage()))
        )
        out = each(torch.randn(7, 24, device=DEVICE, requires_grad=True))
        gc.collect()  # Triton's interpreter makes cycles
        freed.append(found[0].expired())
        del out
    assert freed == [False, True]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(calls, use_reentrant):
    torch.manual_seed(0)
    model, fused = adapted(MLP())
    x = torch.randn(7, 24, device=DEVICE)
    found = gradients(fused, x, lambda x: checkpoint(fused, x, use_reentrant=use_reentrant))
    for one, other in zip(found, gradients(model, x), strict=True):
        torch.testing.assert_close(one, other)
    assert len(calls) == 6


def test_second_derivatives():
    torch.manual_seed(0)
    model, fused = adapted(MLP(activate=lambda gate, up: torch.tanh(gate) * up).double())
    model, fused = model.double(), fused.double()
    x = torch.randn(7, 24, device=DEVICE, dtype=torch.float64)
    results = []
    for each in (fused, model):
        inputs = x.clone().requires_grad_()
        weights = [p for p in each.parameters() if p.requires_grad]
        first = torch.autograd.grad(each(inputs).square().sum(), [inputs, *weights], create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), [inputs, *weights]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    _, fused = adapted(MLP())
    with pytest.raises(KernelError, match="create_graph"):
        torch.autograd.grad(
            fused(x.float()).sum(), [p for p in fused.parameters() if p.requires_grad], create_graph=True
        )


def test_compiles_with_the_forward_of_peft(calls):
    torch.manual_seed(0)
    model, fused = adapted(nn.Sequential(nn.Linear(24, 16)))
    x = torch.randn(7, 24, device=DEVICE)
    found = gradients(fused, x, torch.compile(fused, fullgraph=True, backend="aot_eager"))
    for one, other in zip(found, gradients(model, x), strict=True):
        torch.testing.assert_close(one, other)
    assert not calls


@pytest.mark.parametrize("with_adapter", [True, False])
def test_quantized_layers_equal_dequantized_ones(with_adapter):
    pytest.importorskip("bitsandbytes")
    from opslot.models._adapters.nf4 import _nf4_linear

    torch.manual_seed(0)
    dense = nn.Linear(96, 40).to(DEVICE).requires_grad_(False)
    layer = _nf4_linear(dense)
    layer.load_weight(dense.weight, DEVICE)
    dense.weight.copy_(dequantize(layer.weight))
    if with_adapter:
        inner = nn.Sequential(dense)
        model, _ = adapted(inner)
        fused = copy.deepcopy(model)
        fused[0].base_layer = layer
        fuse_linear_adapters(fused, OpsImplementationConfig())
    else:
        model, fused = dense, layer
    x = torch.randn(5, 96, device=DEVICE)
    found, expected = gradients(fused, x), gradients(model, x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)
