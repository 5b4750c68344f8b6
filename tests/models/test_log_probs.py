"""`return_log_probs=True`: log-probabilities and entropies per token in the output, from kernels and from logits."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import opslot
from opslot._base.errors import ConfigError, KernelError
from opslot.verify.random_model import random_ids, random_model
from opslot.verify.tiny import tiny_config
from tests.models.tiny import tiny_model

FUSED = {"preset": "eager", "cross_entropy_loss_implementation": "chunk_loss"}
# A plain head, a softcap, a scale, a bias, and a class whose name is not that of a language model.
ARCHES = ("qwen3", "gemma2", "granite", "phi", "bert-generation")
T = 0.7


def model_of(arch, **changes):
    return tiny_model(arch, 0.2, **changes)


def batch_of(model, rows=2, length=9):
    torch.manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, (rows, length))
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}


def expected(model, batch, temperature=1.0):
    """From Transformers' logits."""
    logits = model(input_ids=batch["input_ids"]).logits.float() / temperature
    targets = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    distribution = torch.distributions.Categorical(logits=logits)
    counts = targets != -100
    return distribution.log_prob(targets.clamp_min(0)) * counts, distribution.entropy() * counts


def gradients(model, log_probs, entropy):
    weights = torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)
    ((weights * log_probs).sum() - 0.3 * (weights * entropy).sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("ops", [FUSED, "eager"], ids=["fused", "eager"])
@pytest.mark.parametrize("arch", ARCHES)
def test_equals_the_log_softmax_of_the_logits(arch, ops):
    original = model_of(arch)
    model = copy.deepcopy(original)
    opslot.apply(model, ops)
    batch = batch_of(model)
    out = model(**batch, return_log_probs=True, temperature=T)
    wanted = expected(original, batch, T)
    assert out.logits is None
    assert out.log_probs.dtype == out.entropy.dtype == torch.float32
    torch.testing.assert_close((out.log_probs, out.entropy), wanted, rtol=1e-5, atol=1e-5)
    assert out.log_probs[:, -1].count_nonzero() == out.log_probs[:, :2].count_nonzero() == 0
    found, wanted = gradients(model, out.log_probs, out.entropy), gradients(original, *wanted)
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(
            found[name], grad, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("ops", [FUSED, "eager"], ids=["fused", "eager"])
def test_loss_is_the_models_loss(ops):
    model = model_of("qwen3")
    opslot.apply(model, ops)
    batch = batch_of(model)
    for more in ({}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor([7])}):
        asked = model(**batch, **more, return_log_probs=True)
        torch.testing.assert_close(asked.loss.reshape(()), model(**batch, **more).loss.reshape(()))
        assert not hasattr(model(**batch, **more), "log_probs")


@pytest.mark.parametrize("ops", [FUSED, "eager"], ids=["fused", "eager"])
def test_positions_that_the_head_leaves_out_are_zero(ops):
    """Qwen2-Audio's head computes no logits of the last position."""
    model = random_model(tiny_config("qwen2_audio")).eval()
    opslot.apply(model, ops)
    ids = random_ids(model.config)
    out = model(input_ids=ids, labels=ids, return_log_probs=True)
    assert out.log_probs.shape == out.entropy.shape == ids.shape
    assert not out.log_probs[:, -1].any()
    torch.testing.assert_close(out.loss, -out.log_probs.sum() / (ids[:, 1:].numel()))


def test_shift_labels_are_used_as_they_are():
    model = model_of("qwen3")
    opslot.apply(model, FUSED)
    batch = batch_of(model)
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    wanted = model(**batch, return_log_probs=True)
    found = model(**batch, shift_labels=shifted, return_log_probs=True)
    torch.testing.assert_close(found.log_probs, wanted.log_probs, rtol=0, atol=0)


@pytest.mark.parametrize("train", [True, False])
def test_no_tensor_has_the_size_of_the_logits(train):
    """Hidden size 32 and 2 x 400 tokens; the chunks of the logits have 128 rows."""

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes = [x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
            self.most = max([self.most, *sizes])
            return out

    model = model_of("qwen3", vocab_size=20_000).train(train)
    opslot.apply(model, FUSED)
    batch = batch_of(model, 2, 400)
    with Largest() as largest, torch.set_grad_enabled(train):
        out = model(**batch, return_log_probs=True)
        if train:
            (out.log_probs.mean() + out.entropy.mean()).backward()
    assert largest.most < 2 * 400 * 20_000 / 4


def test_ignores_nothing_silently():
    model = model_of("qwen3")
    opslot.apply(model, FUSED)
    batch = batch_of(model)
    with pytest.raises(ConfigError, match="without return_log_probs"):
        model(**batch, temperature=T)
    with pytest.raises(ConfigError, match="needs labels"):
        model(input_ids=batch["input_ids"], return_log_probs=True)
    with pytest.raises(ConfigError, match="return_dict"):
        model(**batch, return_log_probs=True, return_dict=False)
    for wrong in (0, -1.0, float("nan"), torch.tensor(1.0)):
        with pytest.raises(ConfigError, match="temperature must be a positive number"):
            model(**batch, return_log_probs=True, temperature=wrong)
    # The slot has its kernel again after an error.
    assert model._opslot_cross_entropy_loss.name == "chunk_loss"


def test_loss_without_a_slot_raises():
    from transformers import AutoConfig

    config = AutoConfig.for_model("chameleon", hidden_size=32, num_hidden_layers=1, vocabulary_map={"<image>": 8})
    model = opslot.build_foundation_model(config, init_device="meta")
    with pytest.raises(ConfigError, match="ChameleonForConditionalGeneration cannot return log_probs"):
        model(input_ids=torch.ones(1, 2, dtype=torch.long), return_log_probs=True)


def test_loss_over_a_vocabulary_without_a_slot_raises():
    """In classes of other names too, which would ignore the argument."""
    from transformers import BertForPreTraining

    model = BertForPreTraining(tiny_config("bert"))
    opslot.apply(model)
    ids = torch.ones(1, 2, dtype=torch.long)
    with pytest.raises(ConfigError, match="BertForPreTraining cannot return log_probs"):
        model(input_ids=ids, labels=ids, return_log_probs=True)


def test_kernel_without_log_probs_raises(monkeypatch):
    model = model_of("qwen3")
    opslot.apply(model, FUSED)
    monkeypatch.setattr(model._opslot_cross_entropy_loss, "name", "liger_kernel")
    with pytest.raises(KernelError, match="'liger_kernel' has no token_log_probs"):
        model(**batch_of(model), return_log_probs=True)


def test_lora_on_the_head_is_applied():
    from peft import LoraConfig, get_peft_model

    plain = get_peft_model(model_of("qwen3"), LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))
    batch = batch_of(plain)
    wanted = expected(plain, batch)
    opslot.apply(plain)
    out = plain(**batch, return_log_probs=True)
    torch.testing.assert_close((out.log_probs, out.entropy), wanted, rtol=1e-5, atol=1e-5)


def test_router_loss_is_added():
    model = model_of("qwen3_moe")
    opslot.apply(model, FUSED)
    batch = batch_of(model)
    asked = model(**batch, output_router_logits=True, return_log_probs=True)
    torch.testing.assert_close(asked.loss, model(**batch, output_router_logits=True).loss)


@pytest.mark.parametrize(("arch", "by"), [("qwen3", "argument"), ("bloom", "config")])
def test_tuples_have_the_logits_in_their_place(arch, by, monkeypatch):
    original = model_of(arch, return_dict=by == "argument").eval()
    model = copy.deepcopy(original)
    opslot.apply(model, FUSED)
    kernel = model._opslot_cross_entropy_loss
    # As if `auto` had selected it.
    monkeypatch.setattr(kernel, "explicit", False)
    batch = batch_of(model) | ({"return_dict": False} if by == "argument" else {})
    found, wanted = model(**batch), original(**batch)
    assert len(found) == len(wanted)
    torch.testing.assert_close(found[:2], wanted[:2], rtol=1e-5, atol=1e-5)
    assert model._opslot_cross_entropy_loss is kernel
    assert model(**batch | {"return_dict": True}).logits is None


def test_named_kernel_has_no_logits_for_a_tuple():
    model = model_of("qwen3")
    opslot.apply(model, FUSED)
    batch = batch_of(model)
    with pytest.raises(KernelError, match=r"(?s)'chunk_loss' cannot be used with return_dict=False.*return_dict=True"):
        model(**batch, return_dict=False)
    (logits,) = model(input_ids=batch["input_ids"], use_cache=False, return_dict=False)
    assert logits.shape[-1] == model.config.vocab_size
    assert model.eval() is model
    with torch.no_grad():
        assert model(**batch, use_cache=False, return_dict=False)[1].shape == logits.shape


def _encoder_decoder():
    from transformers import EncoderDecoderConfig, EncoderDecoderModel

    encoder, decoder = tiny_config("bert"), tiny_config("bert")
    decoder.is_decoder = decoder.add_cross_attention = True
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return EncoderDecoderModel(config)


def _classifier():
    from transformers import LlamaForTokenClassification

    return LlamaForTokenClassification(tiny_config("llama"))


def _double_heads():
    from transformers import GPT2DoubleHeadsModel

    return GPT2DoubleHeadsModel(tiny_config("gpt2"))


@pytest.mark.parametrize("make", [_encoder_decoder, _classifier, _double_heads])
def test_forward_that_ignores_the_argument_raises(make):
    model = make().eval()
    opslot.apply(model)
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ConfigError, match=f"{type(model).__name__} cannot return log_probs"):
        model(input_ids=ids, labels=ids, return_log_probs=True)
    assert opslot.restore(model)(input_ids=ids, labels=ids, return_log_probs=True).loss is not None
