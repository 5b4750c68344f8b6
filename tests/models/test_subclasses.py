"""Models whose classes, or those of modules in them, the user derived from Transformers' classes."""

import copy
import pickle

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
)

import opslot
from opslot._base.errors import ConfigError
from opslot.models._own_classes import overridden, with_slots
from tests.models.sizes import SIZES

IDS = torch.arange(2 * 12).reshape(2, 12) * 7 % 58 + 3


class Doubled(LlamaForCausalLM):
    """Calls Transformers' forward."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.loss = output.loss * 2
        return output


class Own(LlamaForCausalLM):
    """Has a forward and a head of its own."""

    def __init__(self, config):
        super().__init__(config)
        self.value = torch.nn.Linear(config.hidden_size, 1)

    def forward(self, input_ids, labels=None, **kwargs):
        states = self.model(input_ids, **kwargs).last_hidden_state
        logits = self.lm_head(states)
        loss = self.loss_function(logits, labels, self.config.vocab_size) + self.value(states).square().mean()
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class Reward(LlamaPreTrainedModel):
    """Derives from the class that all models of the architecture derive from."""

    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.score = torch.nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(self, input_ids, labels=None, **kwargs):
        states = self.model(input_ids, output_hidden_states=True, **kwargs).hidden_states
        return CausalLMOutputWithPast(loss=(self.score(states[-1]) + states[1].mean()).square().mean())


class Experts(Qwen3MoeForCausalLM):
    """Adds nothing; its router logits are recorded by class."""


class Norm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return hidden_states.tanh() * self.weight


class HalfMLP(LlamaMLP):
    def forward(self, x):
        return super().forward(x) * 0.5


def model_of(cls):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, **sizes) if cls is Experts else LlamaConfig(**SIZES)
    model = cls(config)
    if cls is Experts:
        model.set_experts_implementation("eager")
    return model


def with_own_modules():
    model = model_of(LlamaForCausalLM)
    for layer in model.model.layers:
        for name, cls in {"post_attention_layernorm": Norm, "mlp": HalfMLP}.items():
            own = cls(SIZES["hidden_size"]) if cls is Norm else cls(model.config)
            own.load_state_dict(getattr(layer, name).state_dict())
            setattr(layer, name, own)
    return model


def step(model):
    model.zero_grad()
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


MAKERS = [*(lambda cls=cls: model_of(cls) for cls in (Doubled, Own, Reward, Experts)), with_own_modules]


@pytest.mark.parametrize("make", MAKERS, ids=["super", "own", "base", "experts", "modules"])
def test_loss_and_gradients_equal_transformers(make):
    original = make()
    model = copy.deepcopy(original)
    report = opslot.apply(model)
    assert "torch_fused" in str(report)
    # Before Transformers puts hooks that cannot be pickled on layers whose states are recorded.
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    found = step(model)
    for got, wanted in zip(found, step(original), strict=True):
        torch.testing.assert_close(got, wanted)
    for twin in twins:
        assert type(twin) is type(model)
        assert all(torch.equal(a, b) for a, b in zip(step(twin), found, strict=True))
    assert make is with_own_modules or isinstance(model, type(original))
    opslot.restore(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]
    assert all(torch.equal(a, b) for a, b in zip(step(model), step(original), strict=True))


def test_kernel_that_an_own_forward_never_calls_raises():
    opslot.apply(model_of(Doubled), {"cross_entropy_loss_implementation": "chunk_loss"})
    with pytest.raises(ConfigError, match=r"Own\.forward overrides LlamaForCausalLM\.forward without calling super"):
        opslot.apply(model_of(Own), {"cross_entropy_loss_implementation": "chunk_loss"})
    with pytest.raises(ConfigError, match=r"Norm\.forward overrides LlamaRMSNorm\.forward"):
        opslot.apply(with_own_modules(), {"rms_norm_implementation": "torch_fused"})


class InheritedLayer(LlamaDecoderLayer):
    """Transformers wraps the inherited forward again in each class derived from its layers."""


class SuperLayer(InheritedLayer):
    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states, **kwargs)


class OwnLayer(InheritedLayer):
    def forward(self, hidden_states, **kwargs):
        return self.mlp(self.input_layernorm(hidden_states))


def test_layers_with_an_inherited_forward_read_their_slots():
    assert overridden(with_slots(InheritedLayer)) is None
    assert overridden(with_slots(SuperLayer)) is None
    assert overridden(with_slots(OwnLayer)).startswith("OwnLayer.forward overrides LlamaDecoderLayer.forward")


def test_original_instances_are_unchanged():
    original, model = model_of(Experts), model_of(Experts)
    wanted = step(original)
    opslot.apply(model)
    assert type(original) is Experts
    assert all(torch.equal(a, b) for a, b in zip(step(original), wanted, strict=True))


def test_saved_architecture_is_the_users_class(tmp_path):
    model = model_of(Doubled)
    opslot.apply(model)
    model.save_pretrained(tmp_path)
    loaded = Doubled.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["Doubled"]
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
