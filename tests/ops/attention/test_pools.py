"""Attention to keys that an indexer selects in pools or blocks: the pools, their bits, and whole models."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import opslot
from opslot.models._multimodal.modalities import decoder_of
from opslot.ops.attention import indexed, pools
from opslot.ops.attention.reference import unpack_bits
from opslot.ops.attention.visible import Visible
from opslot.slots.protocol import keeps_sequences, why_by_document
from opslot.verify import check_architecture
from opslot.verify.random_model import random_model
from opslot.verify.tiny import tiny_config
from opslot.verify.tiny_sizes import TEXT_VOCABULARY
from tests.ops.attention.models import assert_close, results

KERNELS = {"attn_implementation": "triton", "indexer_scores_implementation": "triton"}
ARCHITECTURES = ["qwen4_exp", "minimax_m3_vl", "glm5_next"]
BATCH, TOKENS, HEADS, WIDTH, SIZE = 2, 70, 3, 16, 4


class Module(nn.Module):
    is_causal = True
    config = SimpleNamespace(_attn_implementation="sdpa")


def random_inputs():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, TOKENS, HEADS, WIDTH, generator=generator)
    key = torch.randn(BATCH, TOKENS, WIDTH, generator=generator)
    return query, key, torch.rand(BATCH, TOKENS, HEADS, generator=generator)


def masks_and_layouts(name):
    """The mask bool [B, S, T], and what an indexer gets for it."""
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().expand(BATCH, -1, -1)
    states = torch.zeros(BATCH, 1, TOKENS, 1)
    document = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    document[0, 30:41], document[0, 41:], document[1, 5], document[1, 6:] = 1, 2, 1, 2
    if name == "causal":
        return causal, indexed.visible_keys(Module(), states, states, None, {})
    if name.startswith("documents"):
        mask = causal & (document[:, :, None] == document[:, None])
        if name == "documents as a mask":
            return mask, Visible(None, mask, documents=4)
        cu_seqlens = torch.tensor([0, 30, 41, 70, 75, 76, 140], dtype=torch.int32)
        return mask, indexed.visible_keys(Module(), states, states, None, {"cu_seq_lens_q": cu_seqlens})
    real = document != (1 if name == "padding between tokens" else 0)
    mask = causal & real[:, None]
    if name == "cached keys":
        return mask[:, -2:], indexed.visible_keys(Module(), states[:, :, -2:], states, real, {})
    return mask, indexed.visible_keys(Module(), states, states, real, {})


def seen_in_pools(scores_of, mask, top, with_tail):
    """Of each query, the keys in the `top` complete pools with the highest scores, and those after them."""
    found = torch.zeros_like(mask)
    for b, i in torch.cartesian_prod(torch.arange(mask.shape[0]), torch.arange(mask.shape[1])).tolist():
        keys = mask[b, i].nonzero().flatten()
        count = len(keys) // SIZE
        if count:
            members = keys[: count * SIZE].view(count, SIZE)
            chosen = scores_of(b, i, members).topk(min(top, count)).indices
            found[b, i, members[chosen].flatten()] = True
        if with_tail:
            found[b, i, keys[count * SIZE :]] = True
    return found


@pytest.mark.quick("*-True", "causal-False", "padding-False")
@pytest.mark.parametrize("with_tail", [True, False])
@pytest.mark.parametrize(
    "layout",
    ["causal", "documents", "documents as a mask", "padding", "padding between tokens", "cached keys"],
)
def test_keys_of_the_highest_pools(layout, with_tail):
    query, key, weights = random_inputs()
    mask, visible = masks_and_layouts(layout)
    query, weights = query[:, -mask.shape[1] :], weights[:, -mask.shape[1] :]
    found = pools.pools_of(visible, TOKENS, SIZE)
    bits = pools.select_pools(None, query, found.gather(key).mean(2), weights, 0.3, found, 3, with_tail)

    def scores_of(b, i, members):
        return (weights[b, i][:, None] * (query[b, i] @ key[b][members].mean(1).T).relu()).sum(0)

    assert torch.equal(unpack_bits(bits, TOKENS), seen_in_pools(scores_of, mask, 3, with_tail))


@pytest.mark.quick("causal-7", "documents-1000", "cached*-7")
@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize("layout", ["causal", "documents", "documents as a mask", "cached keys"])
def test_keys_of_the_highest_blocks_of_each_head(monkeypatch, layout, chunk):
    query, key, _ = random_inputs()
    mask, visible = masks_and_layouts(layout)
    query, local, top = query[:, -mask.shape[1] :], 2, 5
    monkeypatch.setattr(indexed, "_SCORES_BYTES", chunk * 4 * BATCH * HEADS * TOKENS)
    bits = pools.select_blocks(None, query, key, visible, SIZE, local, top)
    wanted = torch.zeros(BATCH, HEADS, *mask.shape[1:], dtype=torch.bool)
    for b, i in torch.cartesian_prod(torch.arange(BATCH), torch.arange(mask.shape[1])).tolist():
        blocks = mask[b, i].nonzero().flatten().split(SIZE)
        for head in range(HEADS):
            scores = torch.stack([(key[b][block] @ query[b, i, head]).max() for block in blocks])
            scores[-local:] = float("inf")
            for chosen in scores.topk(min(top, len(blocks))).indices.tolist():
                wanted[b, head, i, blocks[chosen]] = True
    assert torch.equal(unpack_bits(bits, TOKENS), wanted)


def test_pools_of_a_mask_of_other_keys_raise():
    mask = torch.ones(1, 9, 9, dtype=torch.bool).tril()
    mask[0, 7, 3] = False
    with pytest.raises(RuntimeError, match="needs a mask that shows a query the earlier tokens of its document"):
        pools.pools_of(Visible(None, mask), 9, 2)


def batch_of(model, padded="", length=19):
    """Token ids, with padding in the first row at "left" or "right"."""
    ids = torch.randint(3, TEXT_VOCABULARY, (2, length), generator=torch.Generator().manual_seed(0))
    if not padded:
        return ids, {}
    mask = torch.ones_like(ids)
    mask[0, slice(None, 5) if padded == "left" else slice(-5, None)] = 0
    return ids, {"attention_mask": mask, "labels": ids.where(mask == 1, -100)}


@pytest.mark.quick("qwen4_exp-all", "minimax_m3_vl-all", "glm5_next-left")
@pytest.mark.parametrize("padded", ["", "left", "right"], ids=["all", "left", "right"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_model_equals_transformers(arch, padded):
    if (arch, padded) == ("minimax_m3_vl", "left"):
        pytest.skip("Transformers counts blocks from the first padding")
    original = random_model(tiny_config(arch)).train()
    model = copy.deepcopy(original)
    opslot.apply(model, {"preset": "eager", **KERNELS})
    ids, batch = batch_of(model, padded)
    assert_close(results(model, ids, **batch), results(original, ids, **batch))


def test_blocks_are_counted_from_the_first_token_that_is_no_padding():
    """Transformers counts MiniMax-M3's from the first padding, so that padding on the left changes the selection."""
    model = random_model(tiny_config("minimax_m3_vl")).eval()
    opslot.apply(model, {"preset": "eager", **KERNELS})
    ids, batch = batch_of(model, "left")
    with torch.no_grad():
        padded = model(input_ids=ids, attention_mask=batch["attention_mask"], use_cache=False).logits
        alone = model(input_ids=ids[:1, 5:], use_cache=False).logits
    torch.testing.assert_close(padded[:1, 5:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.quick("qwen4_exp-*")
@pytest.mark.parametrize("kernel", [*KERNELS])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_bind_apart(arch, kernel):
    original = random_model(tiny_config(arch)).train()
    model = copy.deepcopy(original)
    opslot.apply(model, {"preset": "eager", kernel: "triton"})
    ids, batch = batch_of(model)
    assert_close(results(model, ids, **batch), results(original, ids, **batch))


@pytest.mark.quick("qwen4_exp")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_eager_is_transformers_bit_for_bit(arch):
    original = random_model(tiny_config(arch)).train()
    model = copy.deepcopy(original)
    opslot.apply(model, "eager")
    ids, batch = batch_of(model)
    got = results(model, ids, **batch)
    assert all(torch.equal(got[name], x) for name, x in results(original, ids, **batch).items())


@pytest.mark.quick("qwen4_exp")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_packed_documents_equal_documents_alone(arch):
    (found,) = check_architecture(tiny_config(arch), {"preset": "eager", **KERNELS}, checks=["packed"]).outcomes
    assert found.result == "passed", found.detail


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_attention_runs_once_for_all_documents_with_a_kernel_alone(arch):
    model = random_model(tiny_config(arch))
    for kernels, once in (("eager", False), ({"preset": "eager", **KERNELS}, True)):
        opslot.apply(model, kernels)
        attentions = [module for module in model.modules() if hasattr(module, "indexer")]
        selecting = [module for module in attentions if module.indexer is not None]
        assert selecting
        assert all((why_by_document(module) is None) is once for module in selecting)
        assert keeps_sequences(decoder_of(model)) is None


def test_no_mask_of_queries_and_keys_is_made():
    model = random_model(tiny_config("qwen4_exp")).train()
    opslot.apply(model, {"preset": "eager", **KERNELS})
    masks = []
    (attention,) = [module for module in model.modules() if hasattr(module, "indexer")]
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    model(input_ids=batch_of(model)[0], use_cache=False)
    assert masks == [None]


@pytest.mark.quick("qwen4_exp")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_generation_equals_transformers(arch):
    original = random_model(tiny_config(arch)).eval()
    model = copy.deepcopy(original)
    opslot.apply(model, {"preset": "eager", **KERNELS})
    ids, batch = batch_of(model, "" if arch == "minimax_m3_vl" else "left", length=9)
    mask = batch.get("attention_mask", torch.ones_like(ids))
    wanted, got = (m.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False) for m in (original, model))
    assert torch.equal(wanted, got)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sharded_sequences_equal_one_process(arch):
    (found,) = check_architecture(tiny_config(arch), {"preset": "eager", **KERNELS}, checks=["sp"]).outcomes
    assert found.result == "passed", found.detail
