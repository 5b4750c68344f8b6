"""Attention to the keys that an indexer selects: bits, their tiles, and whole models."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import opslot
from opslot._base.errors import KernelError
from opslot.ops.attention import bits, indexed
from opslot.ops.attention.batch_invariant import attention as batch_invariant
from opslot.ops.attention.kernels import select_keys as selection
from opslot.ops.attention.kernels.selected_tiles import lists_of, tiles_with_bits, transpose_bits
from opslot.ops.attention.layout import Layout
from opslot.ops.attention.reference import pack_bits, unpack_bits
from opslot.ops.attention.sdpa import sdpa
from opslot.ops.attention.triton import attention
from opslot.ops.attention.visible import Visible
from opslot.ops.indexer_scores.op import standard as eager_scores
from opslot.verify import bisect, check_architecture
from opslot.verify.random_model import random_ids, random_model
from opslot.verify.tiny import tiny_config
from tests.ops.attention.models import assert_close, results

KERNELS = {"attn_implementation": "triton", "indexer_scores_implementation": "triton"}


class Module(nn.Module):
    is_causal = True
    config = SimpleNamespace(_attn_implementation="sdpa")


def highest(scores, top):
    """The `top` keys of the highest scores, the first of equal ones."""
    order = (scores + 0.0).sort(dim=-1, descending=True, stable=True).indices[..., :top]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True) & (scores > float("-inf"))


@pytest.mark.parametrize("keys", [1, 32, 70, 133])
def test_bits_are_those_of_the_mask(keys):
    mask = torch.rand(2, 5, keys) < 0.5
    bits = pack_bits(mask)
    assert bits.dtype == torch.int32
    assert bits.shape == (2, 5, -(-keys // 32))
    assert torch.equal(unpack_bits(bits, keys), mask)
    assert not unpack_bits(bits, bits.shape[2] * 32)[..., keys:].any()


@pytest.mark.parametrize("block", [64, 256], ids=["several blocks", "one block"])
@pytest.mark.parametrize(("keys", "top"), [(70, 5), (200, 17), (33, 40), (150, 1)])
def test_highest_scores_are_selected(monkeypatch, block, keys, top):
    monkeypatch.setattr(selection, "_BLOCK", block)
    scores = torch.randn(2, 6, keys)
    scores[0, 1] = scores[0, 1].round()  # Equal ones.
    scores[0, 5] = float("-inf")
    scores[1, 2, 10:] = float("-inf")
    scores[1, 3] = -scores[1, 3].abs()
    scores[1, 4, ::2], scores[1, 4, 1::2] = -0.0, 0.0
    bits = torch.full((2, 6, -(-keys // 32)), -1, dtype=torch.int32)
    selection.select_keys(scores, top, bits)
    assert torch.equal(bits, pack_bits(highest(scores, top)))


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (32, 64), (64, 32)])
def test_tiles_with_bits(rows, columns):
    queries, keys = 70, 150
    mask = torch.rand(2, queries, keys) < 0.002
    found = tiles_with_bits(pack_bits(mask), keys, rows, columns)
    padded = nn.functional.pad(mask, (0, -keys % columns, 0, -queries % rows))
    wanted = padded.unflatten(2, (-1, columns)).unflatten(1, (-1, rows)).any(4).any(2)
    assert torch.equal(found.bool(), wanted)
    lists = lists_of(found)
    for row, tiles in zip(lists.flatten(0, 1).tolist(), wanted.flatten(0, 1), strict=True):
        assert row[1 : 1 + row[0]] == tiles.nonzero().flatten().tolist()


@pytest.mark.parametrize(("queries", "keys"), [(70, 150), (32, 32), (1, 300)])
def test_transposed_bits(queries, keys):
    mask = torch.rand(2, queries, keys) < 0.3
    assert torch.equal(transpose_bits(pack_bits(mask), keys), pack_bits(mask.mT))


def test_queries_without_keys_return_zeros():
    q, k, v = (torch.randn(1, 2, 40, 32, requires_grad=True) for _ in range(3))
    mask = torch.rand(1, 40, 40) < 0.5
    mask[0, 5:30] = False
    out = attention(Module(), q, k, v, None, selected_bits=pack_bits(mask))[0]
    assert not out[0, 5:30].any()
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(x.isfinite().all() for x in gradients)
    assert not gradients[0][0, :, 5:30].any()


@pytest.mark.parametrize("other", [sdpa, batch_invariant])
def test_kernels_of_all_keys_reject_bits(other):
    q, k, v = (torch.randn(1, 2, 40, 32) for _ in range(3))
    with pytest.raises(KernelError, match="has no selected_bits"):
        other(Module(), q, k, v, None, selected_bits=torch.zeros(1, 40, 2, dtype=torch.int32))


@pytest.mark.parametrize("bits", [torch.zeros(1, 40, 1, dtype=torch.int32), torch.zeros(1, 40, 2, dtype=torch.int64)])
def test_bits_of_another_form_raise(bits):
    q, k, v = (torch.randn(1, 2, 40, 32) for _ in range(3))
    with pytest.raises(
        KernelError, match=r"cannot take selected_bits: .* for 40 keys\n  hint: pass int32 \(1, 40, 2\)"
    ):
        attention(Module(), q, k, v, None, selected_bits=bits)


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_selection_in_chunks_of_queries(monkeypatch, rows):
    q, k, weights = torch.randn(2, 30, 3, 16), torch.randn(2, 40, 16), torch.randn(2, 30, 3)
    shown = torch.rand(2, 30, 40) < 0.7
    starts = torch.arange(30)[None, None].expand(1, 1, -1) // 4
    intervals = torch.cat([starts, starts + 20]).to(torch.int32)
    monkeypatch.setattr(indexed, "_SCORES_BYTES", rows * 2 * 40 * 4 * 3)
    bits = indexed.select_keys(None, q, k, weights, 0.5, Visible(intervals, shown), 6)
    scores = eager_scores(q, k, weights, 0.5, intervals).masked_fill(~shown, float("-inf"))
    assert torch.equal(unpack_bits(bits, 40), highest(scores, 6))


def test_indexers_see_keys_of_their_document():
    query = torch.randn(1, 2, 12, 16)
    cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)
    found = indexed.visible_keys(Module(), query, query, None, {"cu_seq_lens_q": cu_seqlens})
    assert found.intervals.tolist() == [[[0] * 5 + [5] * 7], [list(range(1, 13))]]
    same = indexed.visible_keys(Module(), query, query, Layout(True, cu_seqlens, 7), {})
    assert torch.equal(same.intervals, found.intervals)
    causal = indexed.visible_keys(Module(), query[:, :, -2:], query, torch.ones(1, 12), {})
    assert causal.intervals.tolist() == [[[0, 0]], [[11, 12]]]
    dense = torch.rand(1, 1, 12, 12) < 0.5
    for mask in (dense, torch.where(dense, 0.0, torch.finfo(torch.float32).min)):
        found = indexed.visible_keys(Module(), query, query, mask, {})
        assert found.intervals is None
        assert torch.equal(found.shown, dense[:, 0])


def tiny(arch):
    """A model whose queries select few of their keys, and whose last layer takes those of the one before."""
    config = tiny_config(arch)
    config.get_text_config().index_topk = 4
    return random_model(config).train()


ARCHITECTURES = ["deepseek_v32", "glm_moe_dsa", "hy_v4", "axk2", "mistral_large4", "dots3_note"]


@pytest.mark.quick("deepseek_v32-padded", "hy_v4-all")
@pytest.mark.parametrize("padded", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_model_equals_transformers(arch, padded):
    original = tiny(arch)
    model = copy.deepcopy(original)
    opslot.apply(model, KERNELS)
    ids = torch.randint(2, model.config.get_text_config().vocab_size, (2, 19))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
    batch = {"attention_mask": mask, "labels": ids.where(mask == 1, -100)} if padded else {}
    assert_close(results(model, ids, **batch), results(original, ids, **batch))


@pytest.mark.parametrize(
    "kernels",
    [
        {"attn_implementation": "triton"},
        pytest.param({"indexer_scores_implementation": "triton"}, marks=pytest.mark.slow),
    ],
    ids=["attention", "scores"],
)
def test_kernels_bind_apart(kernels):
    original = tiny("deepseek_v32")
    model = copy.deepcopy(original)
    opslot.apply(model, {"preset": "eager", **kernels})
    ids = torch.randint(2, model.config.vocab_size, (1, 19))
    assert_close(results(model, ids), results(original, ids))


@pytest.mark.parametrize("arch", ["deepseek_v32", pytest.param("hy_v4", marks=pytest.mark.slow)])
def test_eager_is_transformers_bit_for_bit(arch):
    original = tiny(arch)
    model = copy.deepcopy(original)
    opslot.apply(model, "eager")
    ids = torch.randint(2, model.config.vocab_size, (1, 19))
    got = results(model, ids)
    assert all(torch.equal(got[name], x) for name, x in results(original, ids).items())


@pytest.mark.parametrize("kernel", ["triton", "eager"])
def test_packed_documents_equal_documents_alone(kernel):
    original = tiny("glm_moe_dsa")
    model = copy.deepcopy(original)
    opslot.apply(model, {"attn_implementation": kernel})
    lengths = [9, 2, 12]
    ids = torch.randint(2, model.config.vocab_size, (1, sum(lengths)))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packing = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 12, "max_length_k": 12}
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    got = results(model, ids, labels=ids.where(positions > 0, -100), position_ids=positions, **packing)
    predicted = sum(lengths) - len(lengths)
    wanted = None
    for part in ids.split(lengths, 1):
        share = {name: x * (part.shape[1] - 1) / predicted for name, x in results(original, part).items()}
        wanted = share if wanted is None else {name: x + share[name] for name, x in wanted.items()}
    assert_close(got, wanted)


def test_no_mask_of_queries_and_keys_is_made(monkeypatch):
    model = tiny("deepseek_v32")
    opslot.apply(model, KERNELS)
    masks = []
    attend = model.model.layers[0].self_attn
    attend.register_forward_pre_hook(lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True)
    ids = torch.randint(2, model.config.vocab_size, (2, 19))
    model(input_ids=ids, use_cache=False)
    padding = torch.ones_like(ids)
    padding[1, 12:] = 0
    model(input_ids=ids, attention_mask=padding, use_cache=False)
    assert masks[0] is None
    assert isinstance(masks[1], Layout)


@pytest.mark.parametrize("arch", ["deepseek_v32", pytest.param("glm_moe_dsa", marks=pytest.mark.slow)])
def test_generation_equals_transformers(arch):
    original = tiny(arch).eval()
    model = copy.deepcopy(original)
    opslot.apply(model, KERNELS)
    ids = torch.randint(2, model.config.vocab_size, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    wanted, got = (m.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False) for m in (original, model))
    assert torch.equal(wanted, got)


@pytest.mark.parametrize("arch", ["deepseek_v32", pytest.param("minimax_m3_vl_text", marks=pytest.mark.slow)])
def test_bisect_in_16_bits_compares_the_same_selected_keys(arch):
    model = tiny(arch).bfloat16()
    opslot.apply(model, {"preset": "eager", "attn_implementation": "triton"})
    ids = random_ids(model.config)
    found = bisect(model, {"input_ids": ids, "labels": ids})
    assert found.ok, str(found)


def test_implementation_for_other_attention_names_those_for_this_one():
    with pytest.raises(opslot.OpslotError, match="triton"):
        opslot.apply(tiny("deepseek_v32"), {"attn_implementation": "sdpa"})


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("arch", ["deepseek_v32", pytest.param("hy_v4", marks=pytest.mark.slow)])
def test_sharded_sequences_equal_one_process(arch):
    config = tiny_config(arch)
    config.get_text_config().index_topk = 4
    (found,) = check_architecture(config, {"preset": "eager", **KERNELS}, checks=["sp"]).outcomes
    assert found.result == "passed", found.detail


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.quick("deepseek_v32")
@pytest.mark.parametrize("arch", [*ARCHITECTURES[:3], "dots3_note", "qwen4_exp", "minimax_m3_vl", "glm5_next"])
def test_sharded_sequences_without_a_kernel_equal_one_process(arch):
    (found,) = check_architecture(tiny_config(arch), "eager", checks=["sp"]).outcomes
    assert found.result == "passed", found.detail


@pytest.mark.parametrize("cu_seqlens", [None, [0, 3, 20, 21, 40], [0, 13, 20]])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 5), (False, 4)])
def test_intervals_without_triton_equal_the_kernel(cu_seqlens, causal, window):
    like = torch.empty(1)
    for queries in (20,) if cu_seqlens else (20, 7):
        given = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32)
        arguments = given, 2, queries, 20, causal, window
        wanted = bits.visible_intervals(like, *arguments)
        assert torch.equal(bits.eager_intervals(*arguments, like.device).expand_as(wanted), wanted)


def test_selection_without_triton_equals_the_kernel():
    scores = torch.randint(-3, 3, (2, 9, 75)).float()
    scores[:, 0], scores[0, 1, 4:] = float("-inf"), float("-inf")
    scores[scores == 0] *= -1
    for top in (1, 8, 75, 80):
        assert torch.equal(bits.eager_select(scores, top), bits.select(scores, top))


@pytest.mark.parametrize("with_tail", [True, False])
def test_keys_of_pools_without_triton_equal_the_kernel(with_tail):
    rows, keys, queries = 2, 70, 9
    pools = torch.randint(-2, 40, (rows, keys), dtype=torch.int32)
    seen = torch.stack([torch.randint(0, 20, (rows, queries)), torch.randint(20, keys + 1, (rows, queries))]).int()
    tail = torch.randint(0, keys, (rows, queries), dtype=torch.int32) if with_tail else None
    words = torch.randint(-(2**31), 2**31, (rows, 3, queries, 2)).int()
    wanted = bits.expand_pools(words, pools, seen, tail)
    assert torch.equal(bits.eager_expand_pools(words, pools, seen, tail), wanted)
