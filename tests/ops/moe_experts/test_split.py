"""moe_experts/split: gate_proj and up_proj in separate tensors."""

import pytest
import torch
from torch import nn
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode

from opslot import KERNEL_REGISTRY
from opslot._base.errors import ConfigError, KernelError
from opslot.ops.moe_experts import op
from opslot.ops.moe_experts._autograd import Wanted
from opslot.ops.moe_experts.contract import Experts
from opslot.slots import OpSlot, bind, explain, unbind

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = ["grouped_mm", "fused_triton"]
NAMES = ("hidden_states", "gate_proj", "up_proj", "down_proj", "top_k_index", "top_k_weights")
DIFFERENTIABLE = tuple(name for name in NAMES if name != "top_k_index")


def load(name, variant="split"):
    return KERNEL_REGISTRY.load("moe_experts", variant, name)


def inputs(tokens=45, experts=3, top_k=2, hidden=40, intermediate=24, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype).requires_grad_()

    tensors = {
        "hidden_states": randn(tokens, hidden),
        "gate_proj": randn(experts, intermediate, hidden, scale=hidden**-0.5),
        "up_proj": randn(experts, intermediate, hidden, scale=hidden**-0.5),
        "down_proj": randn(experts, intermediate, hidden, scale=intermediate**-0.5),
        "top_k_index": torch.rand((tokens, experts), generator=generator).topk(top_k).indices.to(DEVICE),
        "top_k_weights": randn(tokens, top_k),
    }
    return {name: tensors[name] for name in NAMES}


def merged_weights(tensors):
    gate_up = torch.cat([tensors["gate_proj"], tensors["up_proj"]], 1).detach().requires_grad_()
    rest = {n: t for n, t in tensors.items() if n not in ("gate_proj", "up_proj")}
    rest["down_proj"] = rest["down_proj"].detach().mT.contiguous().requires_grad_()
    return {"hidden_states": rest.pop("hidden_states"), "gate_up_proj": gate_up, **rest}


def gradients(kernel, tensors):
    out = kernel(**tensors)
    leaves = {n: t for n, t in tensors.items() if t.requires_grad}
    return {"output": out, **dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KERNELS)
def test_equals_merged_weights(name, dtype):
    """On a GPU, the Triton kernels add the same terms in the same order.

    Libraries need not for a GEMM of another width, nor does the interpreter, whose dots are NumPy's BLAS: sums of at
    most 45 terms, off by some eps of the largest. grouped_mm adds to an input gradient that is already rounded.
    """
    tensors = inputs(dtype=dtype)
    found = gradients(load(name), tensors)
    expected = gradients(load(name, "standard"), merged_weights(tensors))
    expected["gate_proj"], expected["up_proj"] = expected.pop("gate_up_proj").chunk(2, 1)
    expected["down_proj"] = expected["down_proj"].mT
    assert found.keys() == expected.keys()
    for key, wanted in expected.items():
        if name == "fused_triton" and DEVICE == "cuda":
            assert torch.equal(found[key], wanted), key
        else:
            tolerance_ulps = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(found[key], wanted, rtol=0, atol=tolerance_ulps * wanted.abs().max().item())


@pytest.mark.quick("*-grouped_mm", "wanted0-*", "wanted5-*")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "wanted",
    [
        ("gate_proj",),
        ("up_proj",),
        ("down_proj",),
        ("gate_proj", "down_proj"),
        ("hidden_states", "up_proj"),
        ("hidden_states",),
        ("top_k_weights",),
    ],
)
def test_gradients_of_a_subset(name, wanted):
    tensors = inputs()
    every = gradients(load(name), tensors)
    some = gradients(load(name), {n: t if n in wanted else t.detach() for n, t in tensors.items()})
    assert set(some) == {"output", *wanted}
    assert all(torch.equal(some[n], every[n]) for n in some)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("tokens", [45, 0])
def test_gradients_do_not_share_memory(name, tokens):
    grads = gradients(load(name), inputs(tokens=tokens))
    for weight in ("gate_proj", "up_proj"):
        assert grads[weight].is_contiguous()
        assert grads[weight].untyped_storage().nbytes() == grads[weight].numel() * 4


class _Readers(TorchDispatchMode):
    """Records the operators that read one of these storages."""

    def __init__(self, tensors):
        super().__init__()
        self.storages = {t.untyped_storage().data_ptr() for t in tensors}
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(t.untyped_storage().data_ptr() in self.storages for t in tensors):
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", KERNELS)
def test_weights_are_read_by_matmuls_only(name):
    """No weight is copied or merged with another; on a GPU only the kernels' own matmuls read it."""
    from opslot.ops.moe_experts import grouped_mm, triton

    module = {"grouped_mm": grouped_mm, "fused_triton": triton}[name]
    x, gate, up, down, index, weights = (t.detach() for t in inputs().values())
    experts = Experts(gate, down, up, down_transposed=True)
    with _Readers([gate, up, down]) as readers:
        out, *saved = module._forward(x, experts, index, weights)
        module._backward(torch.ones_like(out), x, experts, weights, saved, Wanted(True, True, False))
    views = {"t", "transpose", "select", "slice", "detach", "view", "expand"}
    matmuls = {"mm", "addmm", "addmm_", "_grouped_mm"}
    # Triton's interpreter copies all arguments of a kernel.
    interpreter = {"new_empty", "copy_"} if name == "fused_triton" and DEVICE == "cpu" else set()
    assert readers.names <= views | matmuls | interpreter | {"empty_like", "zeros_like"}


@pytest.mark.parametrize("name", KERNELS)
def test_opcheck(name):
    load(name)
    x, gate, up, down, index, weights = inputs(tokens=5).values()
    operator = getattr(torch.ops.opslot, f"moe_{name}").default
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (x, gate, down, weights, up, None, None, index, None, 1.0, 0.0, "silu", False, True, False, True)
    torch.library.opcheck(operator, arguments, test_utils=checks)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            {"up_proj": lambda t: t[0]},
            "up_proj [24, 40], down_proj [3, 24, 40]",
        ),
        (
            {"up_proj": lambda t: t[:, :-1]},
            "up_proj [3, 23, 40], down_proj [3, 24, 40]",
        ),
        (
            {"gate_proj": lambda t: torch.cat([t, t], 1)},
            "gate_proj [3, 48, 40], down_proj [3, 24, 40]",
        ),
        ({"up_proj": lambda t: t.bfloat16()}, "gate_proj in torch.float32, up_proj in torch.bfloat16, down_proj in"),
        ({"up_proj": lambda t: t.to("meta")}, "tensors on"),
    ],
)
def test_errors_name_the_arguments_of_the_caller(name, change, found):
    tensors = {n: change[n](t) if n in change else t for n, t in inputs().items()}
    with pytest.raises(KernelError, match="hint:") as caught:
        load(name)(**tensors)
    assert found in str(caught.value)
    assert "gate_up_proj" not in str(caught.value)


@pytest.mark.parametrize("weight", ["gate_proj", "up_proj"])
def test_strided_weights_are_supported_by_grouped_mm_only(weight):
    tensors = inputs()
    expected = load("grouped_mm")(**tensors)
    tensors[weight] = tensors[weight].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(KernelError, match=rf"{weight} with strides \(960, 1, 24\)"):
        load("fused_triton")(**tensors)
    torch.testing.assert_close(load("grouped_mm")(**tensors), expected)


@pytest.mark.parametrize("name", KERNELS)
def test_autocast_downcasts_up_proj(name):
    tensors = inputs()
    with torch.autocast(DEVICE, torch.bfloat16):
        found = gradients(load(name), tensors)
        expected = gradients(op.split, tensors)
    assert {t.dtype for t in found.values()} == {torch.float32}
    for key, wanted in expected.items():
        torch.testing.assert_close(found[key], wanted, rtol=0, atol=2e-2 * wanted.abs().max().item())


class SplitExperts(nn.Module):
    moe_experts = OpSlot("moe_experts", "split")

    def __init__(self, experts=3, hidden=40, intermediate=24):
        super().__init__()
        self.activation_fn = nn.SiLU()
        self.ffn_hidden_size = intermediate
        for name in ("w1", "v1", "w2"):
            setattr(self, name, nn.Parameter(torch.randn(experts * intermediate, hidden) * hidden**-0.5))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        weights = [w.unflatten(0, (-1, self.ffn_hidden_size)) for w in (self.w1, self.v1, self.w2)]
        if self.moe_experts is not None:
            return self.moe_experts(hidden_states, *weights, top_k_index, top_k_weights)
        gate, up = (torch.einsum("th,eih->tei", hidden_states, w) for w in weights[:2])
        outputs = torch.einsum("tei,eih->teh", silu(gate) * up, weights[2])
        chosen = outputs.gather(1, top_k_index.unsqueeze(-1).expand(-1, -1, outputs.shape[-1]))
        return (chosen * top_k_weights.unsqueeze(-1)).sum(1)


def test_custom_module_is_bound_explained_and_compiled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), SplitExperts())
    layer = model[1]
    x, index, weights = (inputs()[n].cpu() for n in ("hidden_states", "top_k_index", "top_k_weights"))
    expected = layer(x, index, weights)
    expected_grads = torch.autograd.grad(expected.square().sum(), list(layer.parameters()))
    bind(model, "auto", device="cpu", dtype=torch.float32)
    (row,) = explain(model).rows
    assert (row.op, row.variant, row.chosen) == ("moe_experts", "split", "grouped_mm")
    out = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, index, weights)
    grads = torch.autograd.grad(out.square().sum(), list(layer.parameters()))
    torch.testing.assert_close((out, *grads), (expected, *expected_grads), rtol=1e-4, atol=1e-4)
    unbind(model)
    assert layer.moe_experts is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"activation_fn": nn.ELU()}, "activation is ELU"),
        ({"v1": None}, r"w1 \(72, 40\), v1 None"),
        ({"w1": nn.Parameter(torch.zeros(48, 40))}, r"w1 \(48, 40\)"),
        ({"ffn_hidden_size": 5}, "with I = 5"),
        ({"has_bias": True}, "have biases"),
        ({"v1_bias": torch.zeros(3, 24)}, "have biases"),
        ({"has_post_expert_norm": True}, "normalized"),
    ],
)
def test_modules_with_other_computation_are_unsupported(change, reason):
    module = SplitExperts()
    assert op.check_split(module) is None
    for name, value in change.items():
        setattr(module, name, value)
    with pytest.raises(ConfigError, match=reason):
        bind(module, {"moe_implementation": "grouped_mm"}, device="cpu")


def test_custom_gating_is_unsupported():
    class Gated(SplitExperts):
        def _apply_gate(self, gate_up):
            return gate_up

    assert "_apply_gate" in op.check_split(Gated())
