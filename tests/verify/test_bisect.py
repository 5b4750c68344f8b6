"""bisect names exactly the slot and the layer that break parity."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config

import opslot
from opslot import KERNEL_REGISTRY, KernelSpec
from opslot._base.errors import ConfigError
from opslot.verify.bisect import Float64Mode, Selections, _Expected, bisect, loss_and_gradients
from opslot.verify.random_model import random_ids, random_model
from opslot.verify.tiny import tiny_config

FIELD = "rms_norm_implementation"
right = KERNEL_REGISTRY.load("rms_norm", "standard", "torch_fused")


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.01


def wrong_for_heads(hidden_states, weight, eps):
    out = right(hidden_states, weight, eps)
    return out * 1.5 if weight.shape[-1] == 8 else out


def wrong_backward(hidden_states, weight, eps):
    return right(_ScaledGradient.apply(hidden_states), weight, eps)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def model(request):
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=101,
        architectures=["Qwen3ForCausalLM"],
    )
    built = opslot.build_foundation_model(config, ops_implementation="eager")
    with torch.no_grad():
        for p in built.parameters():
            p.add_(torch.randn_like(p) * 0.15)
    return built.to(request.param)


@pytest.fixture
def batch():
    ids = torch.randint(101, (2, 33), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


@pytest.fixture
def broken(request):
    KERNEL_REGISTRY.register(KernelSpec("broken", "rms_norm", "standard", lambda: request.param))
    yield "broken"
    KERNEL_REGISTRY.unregister("rms_norm", "standard", "broken")


def test_right_kernels_pass(model, batch):
    ops = {FIELD: "torch_fused", "rotary_pos_emb_implementation": "torch_fused", "attn_implementation": "sdpa"}
    found = opslot.bisect(model, batch, {**ops, "cross_entropy_loss_implementation": "chunk_loss"})
    assert found.ok
    assert not found.culprits
    assert str(found).startswith("no slot breaks parity")


@pytest.mark.parametrize("given", [{}, None, "no/such/folder"])
def test_argument_that_is_not_a_model_raises(batch, given):
    with pytest.raises(ConfigError, match=r"opslot\.bisect takes a model, found (.*\n)  hint: "):
        opslot.bisect(given, batch)


@pytest.mark.parametrize("broken", [wrong_for_heads], indirect=True)
def test_slot_and_layer_are_named(model, batch, broken):
    found = opslot.bisect(model, batch, {"overrides": {"model.layers.1.*": {FIELD: broken}}})
    paths = {path for culprit in found.culprits for path in culprit.paths}
    assert paths
    assert paths <= {"model.layers.1.self_attn.q_norm", "model.layers.1.self_attn.k_norm"}
    assert all((c.field, c.kernel) == (FIELD, "broken") for c in found.culprits)
    assert not found.ok
    assert "rms_norm_implementation=broken at model.layers.1.self_attn" in str(found)


@pytest.mark.parametrize("broken", [wrong_for_heads], indirect=True)
def test_attention_not_chosen_by_opslot_is_not_suspected(model, batch, broken):
    opslot.bind(model, {FIELD: broken, "attn_implementation": "sdpa"})
    model.set_attn_implementation("sdpa")
    found = opslot.bisect(model, batch)
    assert {culprit.field for culprit in found.culprits} == {FIELD}


@pytest.mark.parametrize("broken", [wrong_backward], indirect=True)
def test_wrong_gradient_with_right_loss_is_named(model, batch, broken):
    if next(model.parameters()).dtype == torch.bfloat16:
        pytest.skip("1 % of the gradient of one norm is less than the error of bfloat16")
    model.train()
    opslot.bind(model, {FIELD: "eager", "overrides": {"model.norm": {FIELD: broken}}})
    before = copy.deepcopy(opslot.explain(model))
    found = opslot.bisect(model, batch)
    assert [c.paths for c in found.culprits] == [("model.norm",)]
    assert found.culprits[0].worst.name.startswith("grad ")
    # The model itself is unchanged.
    assert opslot.explain(model) == before
    assert model.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("broken", [wrong_for_heads], indirect=True)
def test_batch_without_labels_raises(model, batch, broken):
    with pytest.raises(ConfigError, match=r"returns no loss on this batch\n  hint: add labels"):
        opslot.bisect(model, {"input_ids": batch["input_ids"]}, {FIELD: broken})


@pytest.mark.quick("deepseek_v3")
@pytest.mark.parametrize("arch", ["deepseek_v3", "deepseek_v4", "gemma3n_text"])
def test_auto_in_bfloat16_is_as_near_to_float64_as_eager(arch):
    """Roundings in routers and norms add up in these more than in others, in Transformers' code too."""
    config = tiny_config(arch)
    model = random_model(config).bfloat16()
    opslot.apply(model)
    ids = torch.randint(3, config.vocab_size, (1, 24), generator=torch.Generator().manual_seed(0))
    found = opslot.bisect(model, {"input_ids": ids, "labels": ids})
    assert found.ok, str(found)


def test_float32_inside_a_model_is_float64_in_the_reference():
    class Casts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((2,), 1 / 3, dtype=torch.float64))

        def forward(self, x):
            inner = x.float().to(torch.float32) + torch.zeros(2, dtype=torch.float32)
            return SimpleNamespace(loss=(inner.softmax(-1, dtype=torch.float32) * self.weight).sum())

    x = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    with Float64Mode():
        loss = loss_and_gradients(Casts(), {"x": x})["loss"]
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss.item(), 1 / 3, rtol=1e-15, atol=0)


def test_other_runs_select_what_one_selected():
    scores = torch.tensor([[1.0, 3.0, 2.0]])
    with Selections() as first:
        torch.topk(scores, 2)
        scores.topk(1, dim=0)
    assert [found.tolist() for found in first.made] == [[[1, 2]], [[0, 0, 0]]]
    others = torch.tensor([[3.0, 1.0, 2.0]], requires_grad=True)
    with Selections(first.made):
        values, indices = torch.topk(others, 2)
        own = others.topk(2)
    assert (values.tolist(), indices.tolist(), own.indices.tolist()) == ([[1.0, 2.0]], [[1, 2]], [[0, 2]])
    values.sum().backward()
    assert others.grad.tolist() == [[0.0, 1.0, 1.0]]


def test_runs_in_16_bits_select_the_experts_of_the_float64_run():
    """Experts with nearly the same scores: bfloat16 rounds them to others, whose gradients have nothing in common."""
    model = random_model(tiny_config("mixtral")).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            gate = layer.mlp.gate.weight
            gate.copy_(gate[:1] + 0.01 * torch.randn(gate.shape, generator=torch.Generator().manual_seed(0)))
    model.to(torch.bfloat16)
    opslot.apply(model, "eager")
    ids = random_ids(model.config)
    batch = {"input_ids": ids, "labels": ids}
    expected, alone = _Expected.of(model, batch), loss_and_gradients(model, batch)
    name = "grad model.layers.1.mlp.experts.down_proj"
    error, other = ((found[name].double() - expected.fp64[name]).norm() for found in (expected.eager, alone))
    assert error < 0.2 * other
    first = expected.compare(model, batch, {})[0]
    assert first.error == first.eager_error
    assert not _Expected.of(model.float(), batch).selected


def test_routing_of_replaced_experts_is_not_counted_twice():
    """Llama 4's experts are replaced with their caller, which then finds the selected experts again."""
    model = random_model(tiny_config("llama4_text")).eval().to(torch.bfloat16)
    opslot.apply(model, "auto")
    ids = random_ids(model.config)
    assert bisect(model, {"input_ids": ids, "labels": ids}).ok
