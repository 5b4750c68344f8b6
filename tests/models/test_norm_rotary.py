"""The slot of attention for RMSNorms of heads with their rotation: where it is used, and where the three run alone."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

import opslot
from tests.models.sizes import MIXED, SIZES
from tests.models.steps import assert_equal, assert_near, run

TRITON = {"rms_norm_implementation": "triton", "rotary_pos_emb_implementation": "triton"}
SEPARATE = {"rms_norm_implementation": "eager", "rotary_pos_emb_implementation": "eager"}
EAGER_REST = {
    "swiglu_mlp_implementation": "eager",
    "cross_entropy_loss_implementation": "eager",
    "attn_implementation": "eager",
}
MIXED_REST = {
    "chunk_gated_delta_rule_implementation": "eager",
    "causal_conv1d_implementation": "eager",
    "rms_norm_gated_implementation": "eager",
    "moe_implementation": "eager",
}
ARCHITECTURES = {
    "qwen3": {},
    "qwen3_5_text": {k: v for k, v in MIXED.items() if "expert" not in k and "moe" not in k},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "glm4_moe": {"use_qk_norm": True, "first_k_dense_replace": 2, "partial_rotary_factor": 0.5},
    "hunyuan_v1_dense": {},
    "exaone4": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "lfm3": {"layer_types": ["full_attention", "full_attention"]},
}
# Layers that normalize and rotate.
FUSED = {"qwen3_5_text": 1, "exaone4": 1}


def build(ops, arch="qwen3", **more):
    config = AutoConfig.for_model(arch, **{**SIZES, **ARCHITECTURES[arch], **more})
    torch.manual_seed(0)
    rest = MIXED_REST if arch == "qwen3_5_text" else {}
    model = opslot.build_foundation_model(config, ops_implementation={**EAGER_REST, **rest, **ops})
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture
def calls(count_calls):
    """Calls of the kernel of all three, and of the rotation alone."""
    from opslot.ops.rotary_pos_emb import norm_triton, triton

    return count_calls(all=(norm_triton, "_norm_rotary"), rotary=(triton._Rotary, "apply"))


@pytest.mark.quick("qwen3", "qwen3_5_text", "gemma3_text", "glm4_moe", "hunyuan_v1_dense")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gradients_equal_the_separate_steps(arch, calls):
    found = run(build(TRITON, arch))
    assert calls == {"all": FUSED.get(arch, 2), "rotary": 0}
    assert_near(found, run(build(SEPARATE, arch)))


@pytest.mark.parametrize("arch", ["qwen3", "glm4_moe"])
def test_eager_equals_transformers_bit_for_bit(arch):
    from transformers import AutoModelForCausalLM

    model = build(SEPARATE, arch)
    original = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation="eager")
    original.load_state_dict(model.state_dict())
    assert_equal(run(model), run(original))


def test_explain_lists_the_slot():
    rows = [r for r in opslot.explain(build(TRITON)) if r.variant == "norm_full"]
    assert [(r.slot, r.chosen, r.why) for r in rows] == [
        ("Qwen3Attention.rotary_pos_emb_norm", "triton", "named by rotary_pos_emb_implementation")
    ]
    assert rows[0].modules == ("model.layers.0.self_attn", "model.layers.1.self_attn")


def test_kernel_without_the_variant_uses_the_separate_slots():
    model = build({**TRITON, "rotary_pos_emb_implementation": "torch_fused"})
    chosen = {r.variant: (r.chosen, r.why) for r in opslot.explain(model) if r.op == "rotary_pos_emb"}
    assert chosen["full"][0] == "torch_fused"
    assert chosen["norm_full"] == ("eager", "torch_fused has no form of it; the slots of full serve")


@pytest.mark.quick("eager-q_norm", "torch_fused-k_norm", "batch_invariant-q_norm")
@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
@pytest.mark.parametrize("kernel", ["eager", "torch_fused", "batch_invariant"])
def test_norm_bound_to_another_kernel_runs_alone(norm, kernel, calls):
    override = {f"model.layers.0.self_attn.{norm}": {"rms_norm_implementation": kernel}}
    found = run(build({**TRITON, "overrides": override}))
    assert calls == {"all": 1, "rotary": 1}
    assert_near(found, run(build(SEPARATE)))


def test_eager_rotation_runs_alone(calls):
    found = run(build({**TRITON, "rotary_pos_emb_implementation": "eager"}))
    assert calls == {"all": 0, "rotary": 0}
    assert_near(found, run(build(SEPARATE)))


def test_heads_without_norms_are_rotated_alone(calls):
    found = run(build(TRITON, "glm4_moe", use_qk_norm=False))
    assert calls == {"all": 0, "rotary": 2}
    assert_near(found, run(build(SEPARATE, "glm4_moe", use_qk_norm=False)))


def test_layers_without_rotation_are_normalized_alone(calls):
    """EXAONE 4 rotates in layers with a sliding window alone."""
    model = build(TRITON, "exaone4")
    seen = []
    for layer in model.model.layers:
        layer.self_attn.q_norm.register_forward_hook(lambda *_: seen.append(1))
    run(model)
    # The hook also turns off the kernel of both in the layer that rotates.
    assert (len(seen), calls) == (2, {"all": 0, "rotary": 1})


@pytest.mark.parametrize("kind", ["forward", "forward pre", "backward", "backward pre"])
def test_hooks_of_a_norm_run(kind, calls):
    model = build(TRITON)
    seen, norm = [], model.model.layers[1].self_attn.k_norm
    register = {
        "forward": norm.register_forward_hook,
        "forward pre": norm.register_forward_pre_hook,
        "backward": norm.register_full_backward_hook,
        "backward pre": norm.register_full_backward_pre_hook,
    }[kind]
    handle = register(lambda *_: seen.append(kind))
    run(model)
    assert seen == [kind]
    assert calls == {"all": 1, "rotary": 1}
    handle.remove()
    run(model)
    assert calls == {"all": 3, "rotary": 1}


def test_replaced_wrapped_or_parametrized_norms_are_called(calls):
    model = build(TRITON)
    first, second = (layer.self_attn for layer in model.model.layers)
    first.q_norm.forward = lambda x: torch.zeros_like(x)

    class Wrapper(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm
            self.calls_seen = 0

        def forward(self, x):
            self.calls_seen += 1
            return self.norm(x)

    second.k_norm = wrapper = Wrapper(second.k_norm)
    model(input_ids=torch.arange(2, 13)[None])
    assert calls == {"all": 0, "rotary": 2}
    assert wrapper.calls_seen == 1
    second.k_norm = wrapper.norm
    nn.utils.parametrize.register_parametrization(second.q_norm, "weight", nn.Identity())
    model(input_ids=torch.arange(2, 13)[None])
    assert calls["all"] == 0


def test_trained_copy_of_a_norm_is_called(calls):
    """PEFT's modules_to_save wrap the norm."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["v_proj"], modules_to_save=["q_norm"], r=2)
    run(peft.get_peft_model(build(TRITON), config))
    assert calls == {"all": 0, "rotary": 2}


@pytest.mark.parametrize("frozen", ["norm", "q_norm", "proj"])
def test_frozen_parameters_get_no_gradient(frozen, calls):
    models = [build(ops) for ops in (TRITON, SEPARATE)]
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
    found, expected = map(run, models)
    assert calls["all"] == 2
    assert not any(frozen in name for name in found)
    assert_near(found, expected)


def test_copies_keep_the_kernel(calls):
    model = build(TRITON)
    expected = run(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        calls["all"] = 0
        assert_equal(run(other), expected)
        assert calls["all"] == 2


def test_restored_model_has_no_slot(calls):
    model = build(TRITON)
    opslot.restore(model)
    run(model)
    assert calls == {"all": 0, "rotary": 0}


def test_activation_checkpointing_computes_the_same_bits(calls):
    model = build(TRITON).train()
    expected = run(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls["all"] = 0
    assert_equal(run(model), expected)
    assert calls["all"] == 4


def test_packed_positions_equal_the_separate_steps(calls):
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]] * 2)
    found = run(build(TRITON), position_ids=positions)
    assert calls["all"] == 2
    assert_near(found, run(build(SEPARATE), position_ids=positions))


@pytest.mark.parametrize("arch", ["qwen3"])
def test_attention_compiles_with_fullgraph(arch):
    attention = build(TRITON, arch).model.layers[0].self_attn
    x, (cos, sin) = torch.randn(2, 7, 32, requires_grad=True), torch.randn(2, 1, 7, 8).unbind(0)
    torch.compiler.reset()

    def step(forward):
        out, _ = forward(x, position_embeddings=(cos, sin), attention_mask=None)
        return out, *torch.autograd.grad(out.square().sum(), [x, *attention.parameters()])

    found = step(torch.compile(attention.forward, fullgraph=True, backend="aot_eager"))
    for one, other in zip(found, step(attention.forward), strict=True):
        torch.testing.assert_close(one, other)


def test_selective_checkpointing_dispatches_the_op(calls):
    attention = build(TRITON).model.layers[0].self_attn
    x, (cos, sin) = torch.randn(2, 7, 32, requires_grad=True), torch.randn(2, 1, 7, 8).unbind(0)

    def forward(x):
        return attention(x, position_embeddings=(cos, sin), attention_mask=None)[0]

    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    op = torch.ops.opslot.norm_rotary_pos_emb.default

    def policy(context, function, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if function is op else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    out = checkpoint(forward, x, use_reentrant=False, context_fn=contexts)
    (found,) = torch.autograd.grad(out.square().sum(), x)
    (expected,) = torch.autograd.grad(forward(x).square().sum(), x)
    torch.testing.assert_close(found, expected)
