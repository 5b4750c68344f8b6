"""Attention to a window and to compressed keys: the kernel's errors, and DeepSeek-V4 with it."""

import copy

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

import opslot
from opslot._base.errors import KernelError
from opslot.ops.attention import compressed_keys
from opslot.ops.attention.cases import CASES
from opslot.ops.attention.compressed import attention
from opslot.ops.attention.compressed_reference import reference
from opslot.verify.random_model import random_model
from opslot.verify.tiny import tiny_config
from tests.ops.attention.models import assert_close, results

LENGTH = 18


class Module(nn.Module):
    is_causal = True


def tensors(width=32, **options):
    query, key = torch.randn(2, 4, 6, width), torch.randn(2, 1, 9, width)
    given = {"query": query, "key": key, "value": key, "compressed_keys": 3, "sliding_window": 2}
    return {**given, "selected": torch.zeros(2, 6, dtype=torch.long), **options}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value": torch.randn(2, 1, 9, 32)}, "cannot take value: it is not the tensor that is also the key"),
        ({"key": torch.randn(2, 2, 9, 32), "value": None}, "supported is one head"),
        ({"cu_seq_lens_q": torch.tensor([0, 12])}, "documents would see each other's compressed keys"),
        ({"attention_mask": torch.zeros(2, 1, 6, 9)}, "supported is a .B, W. padding mask"),
        ({"dropout": 0.1}, "has no dropout"),
        ({"softcap": 2.0}, "has no softcap"),
        ({"selected": torch.zeros(2, 5, dtype=torch.long)}, "pass indices .B, S, K., or counts .B, S."),
        ({"s_aux": torch.zeros(3)}, "pass one number per query head"),
        (tensors(width=520), "supported are sizes up to 512"),
    ],
)
def test_unsupported_arguments_raise(options, message):
    with pytest.raises(KernelError, match=message):
        attention(Module(), **{"attention_mask": None, **tensors(), **options})


def deepseek_v4(**changes):
    config = tiny_config("deepseek_v4")
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    config.update({"layer_types": kinds, "num_hidden_layers": 3, "mlp_layer_types": ["moe"] * 3})
    config.update({"sliding_window": 6, "index_topk": 2, "compress_rates": dict(zip(kinds[1:], (3, 6), strict=True))})
    config.update(changes)
    return random_model(config).train()


@pytest.mark.parametrize(
    "hidden",
    [
        slice(0, 7),
        pytest.param(slice(11, None), marks=pytest.mark.slow),
        pytest.param(slice(5, 8), marks=pytest.mark.slow),
    ],
    ids=["before", "after", "between"],
)
def test_model_with_padding_equals_transformers(hidden):
    """Padding is compressed, so what it attends to matters to the tokens after it."""
    original = deepseek_v4()
    model = copy.deepcopy(original)
    opslot.apply(model, {"attn_implementation": "triton"})
    ids = torch.randint(0, model.config.vocab_size, (2, LENGTH))
    mask = torch.ones_like(ids)
    mask[1, hidden] = 0
    batch = {"attention_mask": mask, "labels": ids.where(mask == 1, -100)}
    assert_close(results(model, ids, **batch), results(original, ids, **batch))


@pytest.mark.parametrize("kernel", ["triton", "eager"])
def test_packed_documents_equal_documents_alone(kernel):
    original = deepseek_v4(num_hidden_layers=2, layer_types=["sliding_attention", "compressed_sparse_attention"])
    model = copy.deepcopy(original)
    opslot.apply(model, {"attn_implementation": kernel})
    ids = torch.randint(0, model.config.vocab_size, (1, LENGTH))
    bounds = [0, 7, LENGTH]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    packing = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 11, "max_length_k": 11}
    labels = ids.clone()
    labels[0, 7] = -100
    got = results(model, ids, labels=labels, **packing)
    counts = [6 / (LENGTH - 2), 10 / (LENGTH - 2)]
    parts = [
        {name: x.clone() * share for name, x in results(original, ids[:, start:stop]).items()}
        for start, stop, share in zip(bounds, bounds[1:], counts, strict=False)
    ]
    assert_close(got, {name: parts[0][name] + x for name, x in parts[1].items()})


def test_generation_equals_transformers():
    original = deepseek_v4().eval()
    model = copy.deepcopy(original)
    opslot.apply(model, {"attn_implementation": "triton"})
    ids = torch.randint(2, model.config.vocab_size, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    wanted, got = (m.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False) for m in (original, model))
    assert torch.equal(wanted, got)


def test_other_models_keep_the_kernel_of_their_variant():
    model, other = (
        deepseek_v4(num_hidden_layers=1, layer_types=["sliding_attention"]),
        random_model(tiny_config("qwen3")),
    )
    for bound in (model, other):
        opslot.apply(bound, {"attn_implementation": "triton"})
    functions = [AttentionInterface()[bound.config._attn_implementation] for bound in (model, other)]
    assert functions[0].__wrapped__ is attention
    assert functions[1].__wrapped__ is not attention


def test_implementation_for_other_attention_names_those_for_this_one():
    with pytest.raises(opslot.OpslotError, match="triton"):
        opslot.apply(
            deepseek_v4(num_hidden_layers=1, layer_types=["sliding_attention"]), {"attn_implementation": "sdpa"}
        )


@pytest.mark.parametrize("tokens", [1, 5])
def test_gradient_of_keys_in_parts_of_queries(monkeypatch, tokens):
    case = next(case for case in CASES["compressed"] if case.name.startswith("few of many"))
    arguments = case.make(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
    query, selected = arguments["query"], arguments["selected"]
    key = arguments["key"].requires_grad_()
    wanted, got = (torch.autograd.grad(f(**arguments)[0].square().sum(), key)[0] for f in (reference, attention))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(compressed_keys, "_PARTS_BYTES", tokens * query.shape[0] * selected.shape[2] * 32 * 4)
    (parts,) = torch.autograd.grad(attention(**arguments)[0].square().sum(), key)
    torch.testing.assert_close(parts, got, rtol=1e-5, atol=1e-5)
