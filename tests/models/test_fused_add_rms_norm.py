"""The fused_add_rms_norm slot of a decoder layer: where it is used, and where the plain norm runs instead."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from transformers import AutoConfig

import opslot
from opslot import KERNEL_REGISTRY
from opslot._base.device import CPU
from opslot.slots import KernelRequest
from tests.models.sizes import SIZES
from tests.models.steps import assert_near, run

TRITON = {"rms_norm_implementation": "triton"}
EAGER_REST = {
    "swiglu_mlp_implementation": "eager",
    "rotary_pos_emb_implementation": "eager",
    "cross_entropy_loss_implementation": "eager",
    "attn_implementation": "eager",
}


def build(ops, arch="llama", **more):
    config = AutoConfig.for_model(arch, **SIZES, **more)
    torch.manual_seed(0)
    return opslot.build_foundation_model(config, ops_implementation={**EAGER_REST, **ops})


@pytest.fixture
def calls(count_calls):
    """Calls of the fused kernel and of the plain one, by variant."""
    from opslot.ops.rms_norm import triton

    return count_calls(fused_add=(triton._FusedAddRMSNorm, "apply"), standard=(triton, "_norm"))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "seed_oss"])
def test_fused_add_gradients_equal_the_two_steps(arch, calls):
    model = build(TRITON, arch)
    found = run(model)
    # Two layers: one input norm per layer and the final norm are not fused; Qwen3 also norms the heads of q and k.
    assert calls == {"fused_add": 2, "standard": 7 if arch == "qwen3" else 3}
    assert_near(found, run(build({"rms_norm_implementation": "eager"}, arch)))


@pytest.mark.parametrize("arch", ["gemma", "gemma2", "gemma3_text", "phi3", "granite"])
def test_fused_add_of_other_layers_equals_the_two_steps(arch, calls):
    """Norms with a weight offset or another name than post_attention_layernorm; terms that are expressions."""
    more = {"residual_multiplier": 0.5} if arch == "granite" else {}
    model = build(TRITON, arch, **more)
    found = run(model)
    assert calls["fused_add"] == 2
    assert_near(found, run(build({"rms_norm_implementation": "eager"}, arch, **more)))


def test_fused_add_weight_offset_is_keyed_by_the_norms_width():
    layer = build(TRITON, "gemma3_text").model.layers[0]
    variant = KERNEL_REGISTRY.op("rms_norm").variant("fused_add_weight_offset")
    request = KernelRequest("rms_norm", variant.name, CPU, torch.float32, layer)
    assert variant.static_shape(request) == {"width": 32, "heads": 1}


def test_explain_lists_the_fused_add_slot():
    rows = [r for r in opslot.explain(build(TRITON)) if r.variant == "fused_add"]
    assert [(r.slot, r.chosen, r.why) for r in rows] == [
        ("LlamaDecoderLayer.rms_norm", "triton", "named by rms_norm_implementation")
    ]
    assert rows[0].modules == ("model.layers.0", "model.layers.1")


def test_kernel_without_fused_add_uses_the_standard_slots():
    model = build({"rms_norm_implementation": "torch_fused"})
    chosen = {r.variant: (r.chosen, r.why) for r in opslot.explain(model) if r.op == "rms_norm"}
    assert chosen["standard"][0] == "torch_fused"
    assert chosen["fused_add"] == ("eager", "torch_fused has no form of it; the slots of standard serve")


def test_eager_norm_disables_fused_add(calls):
    """Like a binding by `bisect`: one norm of one layer differs."""
    override = {"model.layers.0.post_attention_layernorm": {"rms_norm_implementation": "eager"}}
    model = build({**TRITON, "overrides": override})
    found = run(model)
    assert calls == {"fused_add": 1, "standard": 3}
    assert_near(found, run(build({"rms_norm_implementation": "eager"})))


def test_replaced_layer_forward_disables_fused_add():
    """The slots of the plain norms still work, so their kernel can be named."""
    model = build({"rms_norm_implementation": "eager"})
    opslot.restore(model)
    layer = model.model.layers[0]
    layer.forward = layer.forward
    report = opslot.apply(model, {**EAGER_REST, **TRITON})
    chosen = {r.modules: (r.chosen, r.why) for r in report if r.variant == "fused_add"}
    assert chosen[("model.layers.1",)][0] == "triton"
    assert chosen[("model.layers.0",)][0] == "eager"
    assert "forward was replaced" in chosen[("model.layers.0",)][1]


@pytest.mark.parametrize("kind", ["forward", "forward pre", "backward", "backward pre", "global"])
def test_hooks_of_the_norm_run(kind, calls):
    model = build(TRITON)
    norm, calls_seen = model.model.layers[1].post_attention_layernorm, []

    def hook(module, *_):
        if module is norm:
            calls_seen.append(kind)

    register = {
        "forward": norm.register_forward_hook,
        "forward pre": norm.register_forward_pre_hook,
        "backward": norm.register_full_backward_hook,
        "backward pre": norm.register_full_backward_pre_hook,
        "global": nn.modules.module.register_module_forward_hook,
    }[kind]
    handle = register(hook)
    try:
        run(model)
        assert calls_seen == [kind]
        assert calls["fused_add"] == (0 if kind == "global" else 1)
    finally:
        handle.remove()
    calls["fused_add"] = 0
    run(model)
    assert calls["fused_add"] == 2


def test_replaced_or_wrapped_norm_is_called(calls):
    model = build(TRITON)
    first, second = (layer.post_attention_layernorm for layer in model.model.layers)
    first.forward = lambda x: torch.zeros_like(x)

    class Wrapper(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm
            self.calls_seen = 0

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.norm, name)

        def forward(self, x):
            self.calls_seen += 1
            return self.norm(x)

    model.model.layers[1].post_attention_layernorm = wrapper = Wrapper(second)
    ids = torch.arange(2, 13)[None]
    model(input_ids=ids)
    assert calls["fused_add"] == 0
    assert wrapper.calls_seen == 1


def test_copies_keep_fused_add(calls):
    model = build(TRITON)
    expected = run(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ):
        calls["fused_add"] = 0
        found = run(other)
        assert calls["fused_add"] == 2
        assert all(torch.equal(found[n], expected[n]) for n in expected)


def test_activation_checkpointing_recomputes_the_same_bits(calls):
    model = build(TRITON).train()
    expected = run(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls["fused_add"] = 0
    found = run(model)
    assert calls["fused_add"] == 4
    assert all(torch.equal(found[n], expected[n]) for n in expected)


@pytest.mark.quick("True")
@pytest.mark.parametrize("hooked", [False, True])
def test_layer_compiles_with_fullgraph(hooked):
    layer = build(TRITON).model.layers[0]
    if hooked:
        layer.post_attention_layernorm.register_forward_hook(lambda module, args, out: out * 0)
    x, cos, sin = torch.randn(1, 7, 32), torch.ones(1, 7, 8), torch.zeros(1, 7, 8)
    # By default torch.compile does not guard on module hooks.
    torch.compiler.reset()
    compiled = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")
    found = compiled(x, position_embeddings=(cos, sin))
    torch.testing.assert_close(found, layer(x, position_embeddings=(cos, sin)))
    if hooked:
        # The MLP of zeros is zero, so the output is the residual stream.
        attended, _ = layer.self_attn(layer.input_layernorm(x), position_embeddings=(cos, sin), attention_mask=None)
        torch.testing.assert_close(found, x + attended)
