"""Activation checkpointing and offload: the same gradients, and what is kept."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import opslot
from opslot._base.errors import ConfigError
from opslot.distributed import activations, destroy_parallel_state, init_parallel_state
from opslot.distributed.activations import checkpoint_activations, is_saved
from opslot.distributed.fsdp import shard_model
from opslot.verify.tiny import tiny_config


def train(arch, mode, offload=False, compiled=False, layers=2, dtype=torch.float32, ops="auto"):
    """Loss, gradients, and the names of the ops that the backward pass calls."""
    torch.manual_seed(0)
    config = tiny_config(arch)
    config.num_hidden_layers = layers
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    opslot.apply(model, ops)
    checkpoint_activations(model, mode, offload)
    if compiled:
        model.compile(backend="aot_eager")
    ids = torch.randint(0, model.config.vocab_size, (2, 16))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    called = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Calls():
        loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, called


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_gradients_equal_those_without(arch, monkeypatch):
    monkeypatch.setattr(activations, "_SMALLEST", 1)
    loss, gradients, plain = train(arch, "none")
    assert gradients
    recomputed = {}
    for mode, offload in (("full", False), ("full", True), ("selective", False), ("selective", True)):
        found, theirs, called = train(arch, mode, offload)
        assert torch.equal(found, loss)
        assert theirs.keys() == gradients.keys()
        assert all(torch.equal(theirs[name], gradient) for name, gradient in gradients.items())
        recomputed[mode] = len(called)
    assert len(plain) < recomputed["selective"] < recomputed["full"]


def test_selective_recomputes_no_matmul():
    forward_only = "aten::_scaled_dot_product_flash_attention_for_cpu"
    for mode, expected in (("full", True), ("selective", False)):
        assert (forward_only in train("qwen3", mode)[2]) is expected
    counts = {mode: train("qwen3", mode)[2].count("aten::mm") for mode in ("none", "selective", "full")}
    assert counts["none"] == counts["selective"] < counts["full"]


def test_biases_of_experts_are_added_to_a_grouped_gemm_in_place():
    """As Transformers does in the dtypes that torch's grouped GEMM takes."""
    loss, gradients, _ = train("gpt_oss", "none", dtype=torch.bfloat16, ops="eager")
    found, theirs, _ = train("gpt_oss", "selective", dtype=torch.bfloat16, ops="eager")
    assert torch.equal(found, loss)
    assert all(torch.equal(theirs[name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize("offload", [False, True])
def test_groups_of_fsdp_inside_of_layers(offload):
    """Routers in float32 are groups of their own; shared experts are the first that the backward pass recomputes."""
    state = init_parallel_state(device_type="cpu", group_of_one=True)
    gradients = []
    try:
        for mode in ("none", "selective"):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(tiny_config("deepseek_v3"), dtype=torch.bfloat16)
            for name, module in model.named_modules():
                if name.endswith(".gate"):
                    module.float()
            opslot.apply(model, "eager")
            options = {"activation_checkpointing": mode, "activation_offload": offload and mode != "none"}
            opslot.parallelize(model, state, data_parallel_mode="fsdp2", **options)
            assert sum(isinstance(m, FSDPModule) for n, m in model.named_modules() if n.endswith(".gate"))
            ids = torch.arange(32).view(2, 16)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            gradients.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    finally:
        destroy_parallel_state()
    assert all(torch.equal(gradients[1][name], gradient) for name, gradient in gradients[0].items())


def test_selective_compiles():
    """Compiling takes seconds for each layer."""
    loss, gradients, _ = train("qwen3", "none", layers=1)
    found, theirs, _ = train("qwen3", "selective", compiled=True, layers=1)
    torch.testing.assert_close(found, loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(theirs[name], gradient, rtol=1e-4, atol=1e-6)


def test_saved_ops():
    kept = ["aten::mm", "aten::addmm", "aten::_scaled_dot_product_flash_attention", "opslot::moe_grouped_mm"]
    assert all(
        is_saved(name) for name in [*kept, "opslot::attention", "opslot::flash_attention_4", "opslot::aligned_linear"]
    )
    recomputed = ["aten::bmm", "aten::mul", "opslot::rms_norm", "opslot::attention_backward", "opslot::swiglu"]
    assert not any(is_saved(name) for name in recomputed)


def test_inputs_of_layers_are_offloaded(monkeypatch):
    monkeypatch.setattr(activations, "_SMALLEST", 1)
    copied = []
    init = activations._Copy.__init__
    monkeypatch.setattr(
        activations._Copy, "__init__", lambda self, t, before: copied.append(t.shape) or init(self, t, before)
    )
    train("qwen3", "full", True)
    config = tiny_config("qwen3")
    assert copied.count((2, 16, config.hidden_size)) == config.num_hidden_layers


def test_invalid_options_raise():
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3"))
    with pytest.raises(ConfigError, match="activation_checkpointing is none"):
        checkpoint_activations(model, "none", offload=True)
    with pytest.raises(ConfigError, match="hint: use one of none, full, selective"):
        checkpoint_activations(model, "half")


class OuterCheckpoint(nn.Linear):
    """A layer that is checkpointed around its hooks, as in releases of Transformers before 5.23."""

    _gradient_checkpointing_func = None

    def __call__(self, *args, **kwargs):
        return self._gradient_checkpointing_func(functools.partial(super().__call__, **kwargs), *args)

    def forward(self, x, scale):
        assert scale.dtype == x.dtype == torch.bfloat16
        return super().forward(x) * scale


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = OuterCheckpoint(4, 4)
        self.layer._gradient_checkpointing_func = None

    def gradient_checkpointing_enable(self, options):
        pass

    def forward(self, x):
        return self.layer(x, scale=torch.full((4,), 1 / 3))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_inputs_are_cast_before_a_checkpoint_around_hooks(mode, monkeypatch):
    """The FSDP of torch before 2.13 does not cast the inputs of a layer that is recomputed."""
    if torch.__version__ >= "2.13":
        monkeypatch.setattr(FSDPState, "_cast_forward_inputs", lambda self, args, kwargs: (args, kwargs))
    monkeypatch.setattr("opslot.distributed.fsdp.can_copy_parameters", lambda parameters, dtype, device: False)
    state = init_parallel_state(device_type="cpu", group_of_one=True)
    try:
        model = shard_model(
            Layers(), state, layers=["OuterCheckpoint"], param_dtype=torch.bfloat16, activation_checkpointing=mode
        )
        model(torch.randn(2, 4)).sum().backward()
        assert model.layer.weight.grad is not None
    finally:
        destroy_parallel_state()
