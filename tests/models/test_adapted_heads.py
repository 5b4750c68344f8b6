"""An output head with adapters of PEFT keeps the fused loss: no logits, and PEFT's losses and gradients."""

import copy
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import opslot
from opslot._base.errors import ConfigError
from opslot.ops._common import custom_op
from opslot.ops.cross_entropy_loss import chunked
from opslot.verify.tiny import tiny_config

VOCAB = 512
FUSED = {"preset": "eager", "cross_entropy_loss_implementation": "chunk_loss"}
ADAPTERS = {
    "lora": {"target_modules": ["q_proj", "lm_head"], "init_lora_weights": False, "use_rslora": True},
    "whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [3, 500]}},
    "tied tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 500]},
    "tied tokens and lora": {
        "target_modules": ["lm_head"],
        "trainable_token_indices": [3, 500],
        "init_lora_weights": False,
        "lora_alpha": 1,
    },
}
pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")


class Sizes(TorchDispatchMode):
    """Records the size of the largest tensor that an op returns."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor._base is None:
                self.largest = max(self.largest, tensor.numel())
        return out


def base_model(tied=False):
    torch.manual_seed(0)
    config = tiny_config("qwen3")
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    config.vocab_size, config.tie_word_embeddings = VOCAB, tied
    return AutoModelForCausalLM.from_config(config)


def peft_model(adapters):
    return get_peft_model(base_model(adapters.startswith("tied")), LoraConfig(r=3, **ADAPTERS[adapters]))


def loss_and_gradients(model, ids, **options):
    out = model(input_ids=ids, labels=ids, use_cache=False, **options)
    loss = out.log_probs.square().sum() + out.entropy.sum() if options else out.loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("order", ["adapters first", "adapters later"])
@pytest.mark.parametrize("adapters", list(ADAPTERS))
def test_loss_and_gradients_equal_those_of_the_logits(adapters, order):
    expected = peft_model(adapters)
    if order == "adapters first":
        found = copy.deepcopy(expected)
        opslot.apply(found, FUSED)
    else:
        found = base_model(adapters.startswith("tied"))
        opslot.apply(found, FUSED)
        found = get_peft_model(found, LoraConfig(r=3, **ADAPTERS[adapters]))
        found.load_state_dict(expected.state_dict())
    opslot.apply(expected, "eager")
    ids = torch.randint(0, VOCAB, (2, 9))
    for options in ({}, {"return_log_probs": True, "temperature": 0.7}):
        (loss, gradients), (wanted_loss, wanted) = (loss_and_gradients(m, ids, **options) for m in (found, expected))
        torch.testing.assert_close(loss, wanted_loss, rtol=1e-5, atol=1e-6)
        assert gradients.keys() == wanted.keys()
        assert any("lm_head" in name or "tokens_delta" in name for name in wanted)
        for name, gradient in wanted.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5)
    with found.disable_adapter(), expected.disable_adapter():
        torch.testing.assert_close(*(m(input_ids=ids, labels=ids).loss for m in (found, expected)))
    assert found(input_ids=ids, labels=ids).logits is None


@pytest.mark.parametrize("adapters", list(ADAPTERS))
def test_no_tensor_of_the_size_of_the_logits_is_made(adapters, monkeypatch):
    model = peft_model(adapters)
    opslot.apply(model, FUSED)
    ids = torch.randint(0, VOCAB, (32, 32))
    monkeypatch.setattr(chunked, "_chunk_rows", lambda *_: 128)
    # The ops inside the custom op, too.
    monkeypatch.setattr(custom_op, "_modes", lambda: 0)
    with Sizes() as sizes:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert 128 * VOCAB <= sizes.largest < ids.numel() * VOCAB / 2


def test_batch_invariant_adapters_are_added_to_the_logits_in_place():
    """Without a second tensor of the size of a chunk's logits."""
    from opslot.ops._common.batch_invariant import linear_into
    from opslot.ops.cross_entropy_loss.triton import _BACKEND

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = [(8, 16), (96, 16), (8, 3), (96, 3)]
    hidden, weight, low_hidden, low_weight = (torch.randn(shape, device=device) for shape in shapes)
    expected = torch.addmm(hidden @ weight.t(), low_hidden, low_weight.t())
    out = torch.full((8, 112), float("nan"), device=device)[:, :96]
    written = []

    def record(into, *args, **kwargs):
        written.append(into)
        linear_into(into, *args, **kwargs)

    head = chunked.Head(hidden, weight, None, low_hidden, low_weight)
    replace(_BACKEND, linear_into=record).logits_into(out, head, slice(0, 8))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert [into.data_ptr() for into in written] == [out.data_ptr()] * 2


def head_with_dora():
    return get_peft_model(base_model(), LoraConfig(r=2, target_modules=["lm_head"], use_dora=True))


def head_with_trained_tokens_and_a_bias():
    """PEFT leaves the bias out until the rows are merged."""
    model = base_model()
    model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB))
    return get_peft_model(model, LoraConfig(r=2, **ADAPTERS["tokens"]))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (head_with_dora, "adapter of the kind Dora"),
        (head_with_trained_tokens_and_a_bias, "trained tokens and a bias"),
    ],
)
def test_other_heads_compute_logits(build, reason):
    model = build()
    ids = torch.randint(0, VOCAB, (2, 5))
    expected = model(input_ids=ids, labels=ids).loss
    opslot.apply(model, "auto")
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)
    with pytest.raises(ConfigError, match=reason):
        opslot.apply(model, FUSED)


def test_compile_has_no_graph_break():
    model = peft_model("lora")
    opslot.apply(model, FUSED)
    ids = torch.randint(0, VOCAB, (2, 9))
    expected, gradients = loss_and_gradients(model, ids)
    model.zero_grad()
    compiled = torch.compile(lambda ids: model(input_ids=ids, labels=ids).loss, fullgraph=True, backend="aot_eager")
    loss = compiled(ids)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("kernel", ["triton", "batch_invariant"])
def test_memory_on_a_gpu_is_less_than_the_logits(kernel):
    torch.manual_seed(0)
    config = tiny_config("qwen3")
    config.vocab_size, config.tie_word_embeddings = 65536, False
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["lm_head"], init_lora_weights=False))
    expected = copy.deepcopy(model)
    opslot.apply(model, {"preset": "eager", "cross_entropy_loss_implementation": kernel})
    opslot.apply(expected, "eager")
    ids = torch.randint(0, config.vocab_size, (64, 128), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss, gradients = loss_and_gradients(model, ids)
    assert torch.cuda.max_memory_allocated() - before < 0.8 * ids.numel() * config.vocab_size * 2
    expected_loss, wanted = loss_and_gradients(expected, ids)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-2, atol=1e-3)
    for name, gradient in wanted.items():
        error = (gradients[name] - gradient).norm() / gradient.norm()
        assert error < 0.05, (name, error)
