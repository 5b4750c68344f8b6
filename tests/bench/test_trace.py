"""`opslot.trace()` counts and times bound kernels, and changes nothing."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import opslot
from opslot._base.errors import ConfigError
from opslot.slots.slot import BoundKernel


@pytest.fixture(scope="module")
def model():
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        vocab_size=64,
        num_hidden_layers=2,
    )
    built = AutoModelForCausalLM.from_config(config)
    opslot.apply(built, {"rms_norm_implementation": "torch_fused", "attn_implementation": "sdpa"})
    return built


def gradients(model):
    tokens = torch.arange(8)[None]
    model.zero_grad()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_counts_every_kernel_of_a_step(model, capsys):
    with opslot.trace() as trace:
        gradients(model)
    by_op = trace.by_op()
    # Two norms and two of the heads per layer, and the last one.
    norms = by_op["rms_norm/standard", "torch_fused"]
    assert (norms.forward, norms.backward) == (9, 9)
    assert norms.forward_ms > 0
    assert norms.backward_ms > 0
    attention = next(calls for (op, _), calls in by_op.items() if op == "attention")
    assert (attention.forward, attention.backward) == (2, 2)
    assert trace.calls[("rms_norm/standard", "torch_fused", "model.layers.1.input_layernorm")].forward == 1
    printed = capsys.readouterr().out
    assert "model.layers.*.input_layernorm" in printed
    assert "Qwen3Attention *" in printed


def test_trace_changes_no_gradient_and_leaves_nothing(model):
    from transformers import AttentionInterface

    before, call, attention = gradients(model), BoundKernel.__call__, dict(AttentionInterface._global_mapping)
    with opslot.trace(show=False):
        traced = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(before, traced, strict=True))
    assert BoundKernel.__call__ is call
    assert attention == AttentionInterface._global_mapping


def test_forward_alone_has_no_backward(model):
    with opslot.trace(show=False) as trace, torch.no_grad():
        model(input_ids=torch.arange(8)[None], use_cache=False)
    assert all(calls.backward == 0 and calls.forward for calls in trace.calls.values())


def test_second_trace_raises(model):
    with opslot.trace(show=False), pytest.raises(ConfigError, match="active already"), opslot.trace():
        pass
    with opslot.trace(show=False) as trace:
        pass
    assert str(trace) == "no bound kernel ran"


def test_error_inside_restores(model):
    call = BoundKernel.__call__
    with pytest.raises(ValueError, match="mine"), opslot.trace():
        raise ValueError("mine")
    assert BoundKernel.__call__ is call
