"""Models whose head or loss a fused kernel cannot compute: eager code under auto, an error where it is named."""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils import _pytree as pytree
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.loss.loss_utils import LOSS_MAPPING

import opslot
from opslot._base.errors import ConfigError, KernelError
from opslot.slots.protocol import LOSS_FUNCTION
from opslot.verify.random_model import random_ids
from opslot.verify.tiny import tiny_config

FUSED = {"preset": "eager", "cross_entropy_loss_implementation": "chunk_loss"}


def model_of(arch="qwen3", cls=AutoModelForCausalLM):
    torch.manual_seed(0)
    config = tiny_config(arch)
    config.tie_word_embeddings, config.pad_token_id = False, 0
    return cls.from_config(config)


def loss_and_gradients(model, ids, labels):
    model.zero_grad()
    loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def selected_by_auto(model):
    """As `auto` selects the kernel where it is the fastest."""
    for module in model.modules():
        if "_opslot_cross_entropy_loss" in vars(module):
            module._opslot_cross_entropy_loss.explicit = False


def check(model, change, match, labels=None):
    """`change(model)` gives Transformers' losses and gradients under auto, and an error with a named kernel."""
    original, ids = copy.deepcopy(model), random_ids(model.config)
    opslot.apply(model, FUSED)
    for each in (model, original):
        change(each)
    labels = ids if labels is None else labels
    with pytest.raises(KernelError, match=match):
        loss_and_gradients(model, ids, labels)
    selected_by_auto(model)
    torch.testing.assert_close(loss_and_gradients(model, ids, labels), loss_and_gradients(original, ids, labels))


@pytest.mark.parametrize("arch", ["qwen3", "gemma2"])
def test_options_of_kernels_are_not_arguments_of_a_model(arch):
    """Transformers' loss functions ignore them, and so do kernels, instead of computing another loss."""
    model = model_of(arch)
    options = {"label_smoothing": 0.5, "logit_scale": 2.0, "head": 1}
    ids = random_ids(model.config)
    expected = model(input_ids=ids, labels=ids, **options).loss
    opslot.apply(model, FUSED)
    found = model(input_ids=ids, labels=ids, **options)
    assert found.logits is None
    torch.testing.assert_close(found.loss, expected)


class Halves(torch.Tensor):
    """A weight stored as half of itself, which only torch's linear and what modules do can read."""

    @staticmethod
    def __new__(cls, half):
        return torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=half.dtype)

    def __init__(self, half):
        self.half_of_it = half

    def __tensor_flatten__(self):
        return ["half_of_it"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["half_of_it"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].half_of_it)
        if "opslot" in str(func):
            raise NotImplementedError(func)
        values = pytree.tree_map_only(cls, lambda x: x.half_of_it * 2, (args, kwargs or {}))
        return func(*values[0], **values[1])


def store_as_halves(module):
    module.weight = nn.Parameter(Halves(module.weight.detach() / 2), requires_grad=False)


def test_head_of_a_tensor_subclass_computes_logits():
    check(model_of(), lambda model: store_as_halves(model.lm_head), "weight is stored as tests.Halves")


def test_head_of_a_tensor_subclass_is_known_when_bound():
    model = model_of()
    store_as_halves(model.lm_head)
    with pytest.raises(ConfigError, match=r"the head's weight is stored as tests\.Halves; use eager or auto there"):
        opslot.apply(model, FUSED)
    assert "weight is stored as tests.Halves" in str(opslot.apply(model))


def test_linear_layer_of_a_tensor_subclass_is_known_when_bound():
    model = model_of()
    store_as_halves(model.model.layers[0].self_attn.q_proj)
    with pytest.raises(ConfigError, match=r"q_proj: .*its weight is stored as tests\.Halves"):
        opslot.apply(model, {"preset": "eager", "linear_implementation": "fp8"})


def test_another_loss_type_computes_logits():
    def labels_in_place(model):
        model.loss_type = "ForMaskedLM"

    check(model_of(), labels_in_place, "loss_function is another than Transformers' ForCausalLMLoss")


def test_another_function_for_a_loss_type_computes_logits(monkeypatch):
    def own(logits, labels, vocab_size, **kwargs):
        return logits.square().mean()

    check(
        model_of(),
        lambda model: monkeypatch.setitem(LOSS_MAPPING, "ForCausalLM", own),
        "loss_function is another than Transformers' ForCausalLMLoss",
    )


def test_another_loss_of_a_classifier_is_computed(monkeypatch):
    def own(labels, pooled_logits, config, **kwargs):
        return pooled_logits.square().mean()

    check(
        model_of(cls=AutoModelForSequenceClassification),
        lambda model: monkeypatch.setitem(LOSS_MAPPING, "ForSequenceClassification", own),
        "loss_function is another than Transformers' ForSequenceClassificationLoss",
        labels=torch.tensor([1, 0]),
    )


@pytest.mark.parametrize("arch", ["qwen3", "modernbert", "t5gemma2"])
def test_loss_of_the_class_is_the_one_of_the_model(arch):
    config = tiny_config(arch)
    kind = {"modernbert": "MaskedLM", "t5gemma2": "Seq2SeqLM"}.get(arch, "CausalLM")
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    opslot.apply(model, "eager")
    assert model.loss_function.__name__ == getattr(type(model), LOSS_FUNCTION)


@pytest.mark.parametrize("ops", ["eager", "auto", FUSED], ids=["eager", "auto", "fused"])
def test_spectral_norm_iterates_once_per_step(ops):
    model = model_of()
    for linear in (model.lm_head, model.model.layers[0].mlp.gate_proj):
        spectral_norm(linear)
    model.train()
    bound = copy.deepcopy(model)
    opslot.apply(bound, ops)
    ids = random_ids(model.config)
    (loss, gradients), (wanted, wanted_gradients) = (loss_and_gradients(m, ids, ids) for m in (bound, model))
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(gradients, wanted_gradients, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(dict(bound.named_buffers()), dict(model.named_buffers()))
