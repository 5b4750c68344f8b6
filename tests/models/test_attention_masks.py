"""Every kind of attention under a kernel computes what Transformers does, and without dense masks."""

import contextlib
import copy
import dataclasses

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache, masking_utils

import opslot
from opslot import KERNEL_REGISTRY
from opslot._base.errors import KernelError
from opslot._base.host_values import remember_source
from opslot.ops._common.documents import longest_document
from opslot.ops.attention import masks, op
from opslot.ops.attention.layout import split_documents
from opslot.ops.attention.mask_patterns import pattern_of
from opslot.slots import KernelSpec
from opslot.verify.tiny import shrink, tiny_config
from tests.models.sizes import SIZES as COMMON

SIZES = {
    **COMMON,
    "vocab_size": 64,
    "eos_token_id": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
KINDS = {
    "mistral": {"sliding_window": 5},
    "gpt_oss": SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": SLIDING | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0},
    "gemma3_text": SLIDING | {"query_pre_attn_scalar": 8},
    "mimo_v2_flash": SLIDING | EXPERTS | {"v_head_dim": 4, "n_routed_experts": 4},
    # Its modules do not pass their window to attention.
    "phimoe": {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": EXPERTS
    | {"n_routed_experts": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
    "llama4_text": {"attention_chunk_size": 4, "layer_types": ["chunked_attention", "full_attention"]}
    | {"no_rope_layers": [1, 0], "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48},
}
IDS = torch.randint(3, 64, (2, 17), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.cat([torch.arange(9), torch.arange(8)])[None].expand(2, -1)
CU_SEQLENS = torch.tensor([0, 9, 17, 26, 34], dtype=torch.int32)
DOCUMENTS = {"cu_seq_lens_q": CU_SEQLENS, "cu_seq_lens_k": CU_SEQLENS, "max_length_q": 9, "max_length_k": 9}


def original(name):
    config = AutoConfig.for_model(name, **{**SIZES, **KINDS[name]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter == 1))
    return model


@pytest.fixture
def flash_like(monkeypatch):
    """A kernel that, as FlashAttention, takes no mask but padding; yields the masks that it gets."""
    given = []

    def kernel(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
        given.append(attention_mask)
        return op.reference(module, query, key, value, attention_mask, dropout, scaling, **kwargs)

    kernel.mask_function = masking_utils.flash_attention_mask
    spec = KernelSpec("flash_like", "attention", "causal", lambda: kernel)
    monkeypatch.setattr(KERNEL_REGISTRY, "_specs", dict(KERNEL_REGISTRY._specs))
    KERNEL_REGISTRY.register(spec)
    return given


def close(found, expected, real=None):
    real = torch.ones_like(IDS) if real is None else real
    torch.testing.assert_close(found[real.bool()], expected[real.bool()], rtol=1e-4, atol=1e-4)


def flash_like_model(expected):
    """A copy of `expected` with the kernel of `flash_like`, after comparing their first outputs with and without
    padding."""
    model = copy.deepcopy(expected)
    opslot.apply(model, {"preset": "eager", "attn_implementation": "flash_like"})
    right = torch.ones_like(IDS)
    right[0, 11:] = 0
    for padding in (None, torch.ones_like(IDS), right, right.flip(1)):
        close(model(IDS, attention_mask=padding)[0], expected(IDS, attention_mask=padding)[0], padding)
    return model


@pytest.mark.parametrize("name", KINDS)
def test_masks_of_whole_sequences_are_not_dense(name, flash_like):
    expected = original(name)
    with torch.no_grad():
        model = flash_like_model(expected)
        separate = torch.cat([expected(ids).logits for ids in IDS.split([9, 8], 1)], 1)
        close(model(IDS, position_ids=POSITIONS, use_cache=False, **DOCUMENTS).logits, separate)
        if name != "gpt_oss":
            # Transformers makes its masks without position_ids.
            close(model(IDS, position_ids=POSITIONS, use_cache=False).logits, separate)
    assert flash_like
    assert all(mask is None for mask in flash_like)


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "deepseek_v3", "llama4_text"])
def test_sdpa_equals_transformers(name):
    """Also with padding between tokens, and with a cache, where there are more keys than queries."""
    expected = original(name)
    model = copy.deepcopy(expected)
    opslot.apply(model, {"preset": "eager", "attn_implementation": "sdpa"})
    left, between = torch.ones_like(IDS), torch.ones_like(IDS)
    left[0, :6], between[0, 3:6] = 0, 0
    with torch.no_grad():
        for padding in (None, left, left.flip(1), between):
            close(model(IDS, attention_mask=padding).logits, expected(IDS, attention_mask=padding).logits, padding)
        options = {"max_new_tokens": 7, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        for cache in ("dynamic", "static"):
            options["cache_implementation"] = cache
            found, wanted = (m.generate(IDS, attention_mask=left, **options) for m in (model, expected))
            torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_padding_between_tokens_where_auto_selects_a_kernel_without_masks(name, flash_like):
    """Such a kernel would remove the padding, and see tokens before a sliding window."""
    expected = original(name)
    model = copy.deepcopy(expected)
    spec = KERNEL_REGISTRY.get("attention", "causal", "flash_like")
    KERNEL_REGISTRY.register(dataclasses.replace(spec, priority=99), replace=True)
    assert opslot.apply(model, "auto").chosen("attention") == ("flash_like",)
    between = torch.ones_like(IDS)
    between[0, 3:6] = between[1, 8:10] = 0
    with torch.no_grad():
        # A chunk of padding alone attends to nothing.
        real = between if name == "llama4_text" else None
        close(model(IDS, attention_mask=between).logits, expected(IDS, attention_mask=between).logits, real)
    assert not flash_like


def test_generation_with_a_static_cache_where_auto_selects_a_kernel_without_masks(flash_like, monkeypatch):
    """Padding on the left sees no key in a dense mask; NaN in its states would reach the tokens in the next layer."""
    monkeypatch.setitem(KINDS, "gemma2", KINDS["gemma2"] | {"layer_types": ["full_attention"] * 2})
    expected = original("gemma2")
    model = copy.deepcopy(expected)
    spec = KERNEL_REGISTRY.get("attention", "causal", "flash_like")
    KERNEL_REGISTRY.register(dataclasses.replace(spec, priority=99), replace=True)
    opslot.apply(model, {"preset": "eager", "attn_implementation": "auto"})
    left = torch.ones_like(IDS)
    left[0, :6] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    options |= {"cache_implementation": "static", "disable_compile": True}
    found, wanted = (m.generate(IDS, attention_mask=left, **options).logits for m in (model, expected))
    torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=1e-4, atol=1e-4)


def test_kernel_without_masks_names_the_mask_that_it_cannot_apply():
    make = masks.MaskFunction(masking_utils.flash_attention_mask, "flash_like")
    images = masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: (q < 4) & (k < 4))
    with pytest.raises(KernelError, match=r"'flash_like' cannot apply this mask \(or_masks(.|\n)*hint: use sdpa"):
        make(1, 9, 9, mask_function=images, attention_mask=None)


@pytest.mark.parametrize(
    "function",
    [lambda b, h, q, k: q == k, lambda b, h, q, k: any(q == j == k for j in range(9)), lambda *args: args[2] == 0],
)
def test_functions_that_read_their_arguments_are_not_taken_for_constant_ones(function):
    assert pattern_of(masking_utils.or_masks(masking_utils.causal_mask_function, function)) is None


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((9, 1, 4), [0, 4, 8, 9, 10, 14]),
        ((4, 4), [0, 4, 8]),
        ((1, 1, 1), [0, 1, 2, 3]),
        ((0, 5), [0, 4, 5]),
    ],
)
def test_split_documents(lengths, expected):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    found = split_documents(cu_seqlens, sum(lengths), 4)
    assert found.dtype == torch.int32
    assert found.unique().tolist() == expected
    assert found.tolist() == sorted(found.tolist())
    assert len(found) == len(lengths) + sum(lengths) // 4 + 1


def test_documents_of_any_length_are_split_in_one_compiled_graph():
    """As of Llama 4, whose layers with chunks split each row."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    split = torch.compile(split_documents, fullgraph=True, dynamic=True, backend=counter)
    for length in (9, 14, 23):
        cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
        assert torch.equal(split(cu_seqlens, length, 4), split_documents(cu_seqlens, length, 4))
    assert counter.frame_count == 1


def test_mask_passed_to_a_model_inside_that_makes_masks_again():
    """As Molmo 2 does, with packed documents given by positions alone."""
    from opslot.verify.random_model import random_model
    from opslot.verify.tiny import tiny_config

    upstream = random_model(tiny_config("molmo2")).eval()
    model = copy.deepcopy(upstream)
    opslot.apply(model, "auto")
    ids = torch.randint(3, 50, (1, 20), generator=torch.Generator().manual_seed(0))
    call = {"input_ids": ids, "labels": ids, "position_ids": torch.tensor([[*range(12), *range(8)]])}
    found, expected = (m(**call, use_cache=False).loss for m in (model, upstream))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def prefill_and_decode(model):
    """Logits of a prefill and of two steps with a static cache longer than the sequence."""
    cache = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        return [model(ids, past_key_values=cache).logits for ids in (IDS, IDS[:, :1], IDS[:, 1:2])]


def test_static_cache_equals_transformers():
    """A static cache has unused keys after the last query."""
    model = original("deepseek_v3")
    expected = prefill_and_decode(model)
    opslot.apply(model, {"attn_implementation": "sdpa"})
    for found, logits in zip(prefill_and_decode(model), expected, strict=True):
        close(found, logits, torch.ones(logits.shape[:2]))


def test_kernel_without_masks_rejects_a_static_cache(flash_like):
    model = original("deepseek_v3")
    opslot.apply(model, {"attn_implementation": "flash_like"})
    with pytest.raises(KernelError, match=r"17 queries, 32 keys.*\n.*use sdpa or eager"):
        prefill_and_decode(model)


@pytest.mark.parametrize("offset", [0, torch.tensor(0)])
def test_static_cache_gets_a_dense_mask_where_auto_selected_a_kernel_without_masks(offset):
    make = masks.MaskFunction(masking_utils.flash_attention_mask, "flash_like", falls_back=True)
    mask = make(2, 3, 5, offset, attention_mask=torch.tensor([[True] * 3, [False, True, True]]))
    assert mask[0, 0].tolist() == [[j <= i for j in range(5)] for i in range(3)]
    assert mask[1, 0, 1:].tolist() == [[0 < j <= i for j in range(5)] for i in (1, 2)]


def test_bidirectional_mask_overrides_a_module_that_is_causal():
    """The attention of Phi-4 multimodal's image encoder has `is_causal = True`."""
    make = masks.MaskFunction(masking_utils.sdpa_mask, "sdpa")
    mask = make(1, 4, 4, mask_function=masking_utils.bidirectional_mask_function, allow_is_bidirectional_skip=True)
    module = torch.nn.Module()
    module.is_causal = True
    query, key, value = torch.randn(3, 1, 2, 4, 8)
    attend = masks.reads_layout(KERNEL_REGISTRY.load("attention", "causal", "sdpa"))
    found, _ = attend(module, query, key, value, mask)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(found, wanted.transpose(1, 2))


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_masks_that_other_classes_read_are_transformers():
    """LASR's convolution zeroes the padding that the mask of attention hides."""
    config = shrink(transformers.LasrEncoderConfig())
    model = transformers.LasrEncoder(config).eval()
    features, padding = torch.randn(2, 64, config.num_mel_bins), torch.ones(2, 64, dtype=torch.long)
    padding[1, 40:] = 0
    with torch.no_grad():
        expected = [model(features, attention_mask=mask).last_hidden_state for mask in (None, padding)]
        opslot.apply(model, {"preset": "eager", "attn_implementation": "auto"})
        found = [model(features, attention_mask=mask).last_hidden_state for mask in (None, padding)]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kernel", ["sdpa", "triton"])
def test_autocast_casts_queries_keys_and_values(kernel):
    """Norms and rotary embeddings of queries and keys may return float32 under autocast, as those of Qwen3 do."""
    if (reason := KERNEL_REGISTRY.get("attention", "causal", kernel).unsupported_here()) is not None:
        pytest.skip(reason)
    attend = masks.reads_layout(KERNEL_REGISTRY.load("attention", "causal", kernel))
    query, key, value = torch.randn(3, 1, 2, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = attend(torch.nn.Module(), query, key, value.bfloat16(), None, is_causal=True)
        wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted.transpose(1, 2))


@pytest.mark.parametrize("compiles", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("kernel", ["sdpa", "triton"])
@pytest.mark.parametrize("padded", [slice(11, None), slice(4, 6)], ids=["right", "between"])
def test_causal_mask_overrides_a_module_that_is_not_causal(padded, kernel, compiles):
    """AIMv2's encoder of text has the attention of images, which passes is_causal=False, and gets causal masks."""
    if kernel == "triton":
        pytest.importorskip("triton")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = transformers.Aimv2TextModel(transformers.Aimv2TextConfig(**sizes, num_attention_heads=4)).eval()
    padding = torch.ones_like(IDS)
    padding[1, padded] = 0
    raises = pytest.raises(RuntimeError, match="no padding between tokens; use sdpa")
    with torch.no_grad():
        expected = model(IDS, attention_mask=padding).last_hidden_state
        opslot.apply(model, {"preset": "eager", "attn_implementation": kernel})
        model = torch.compile(model, backend="eager") if compiles else model
        with raises if compiles and kernel == "triton" and padded.stop else contextlib.nullcontext():
            close(model(IDS, attention_mask=padding).last_hidden_state, expected, padding)


@pytest.mark.parametrize("name", ["mistral", "llama4_text"])
@pytest.mark.parametrize("kernel", ["sdpa", "triton", "auto"])
def test_loss_of_the_first_token_after_padding_on_the_left(kernel, name):
    """Its logits are those of the last padding, which attends to nothing; `-100` hides the labels of padding alone."""
    if kernel == "triton" and (reason := KERNEL_REGISTRY.get("attention", "causal", kernel).unsupported_here()):
        pytest.skip(reason)
    model, expected = original(name), original(name)
    expected.set_attn_implementation("sdpa")
    opslot.apply(model, {"preset": "eager", "attn_implementation": kernel})
    padding = torch.ones_like(IDS)
    padding[0, :6] = 0
    labels = IDS.masked_fill(padding == 0, -100)
    found, wanted = (train(m, padding, labels) for m in (model, expected))
    for part in wanted:
        torch.testing.assert_close(found[part], wanted[part], rtol=1e-4, atol=1e-5)


@pytest.mark.quick("gpt_oss-*", "phimoe-*", "llama4_text-*")
@pytest.mark.parametrize(
    ("name", "kernel"),
    [(name, "triton") for name in ("mistral", "gpt_oss", "phimoe", "llama4_text")] + [("llama4_text", "sdpa")],
)
def test_compiled_model_with_padding_is_one_graph(name, kernel):
    """Rows with padding on the left, on the right and on both sides, of padding alone, and without any."""
    if (reason := KERNEL_REGISTRY.get("attention", "causal", kernel).unsupported_here()) is not None:
        pytest.skip(reason)
    model, expected = original(name), original(name)
    if name != "gpt_oss":
        expected.set_attn_implementation("sdpa")
    opslot.apply(model, {"preset": "eager", "attn_implementation": kernel, "moe_implementation": "grouped_mm"})
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    ids = torch.randint(3, 64, (5, 9), generator=torch.Generator().manual_seed(1))
    padding = torch.ones_like(ids)
    padding[0, :6] = padding[1, 5:] = padding[2, 7:] = padding[2, :2] = padding[3] = 0
    labels = ids.masked_fill(padding == 0, -100)
    found, wanted = (train(m, padding, labels, ids) for m in (compiled, expected))
    for part in wanted:
        torch.testing.assert_close(found[part], wanted[part], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_exported_model_with_padding_takes_other_shapes():
    if (reason := KERNEL_REGISTRY.get("attention", "causal", "triton").unsupported_here()) is not None:
        pytest.skip(reason)
    model = original("mistral")
    expected = copy.deepcopy(model)
    opslot.apply(model, {"preset": "eager", "attn_implementation": "triton"})
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=4, max=64)
    shape = {0: batch, 1: length}

    def inputs(*shape):
        padding = torch.ones(shape, dtype=torch.long)
        padding[0, :6] = padding[1, 5:] = 0
        return {"input_ids": torch.full(shape, 7), "attention_mask": padding, "use_cache": False}

    shapes = {"input_ids": shape, "attention_mask": shape, "use_cache": None}
    exported = torch.export.export(model, (), inputs(2, 9), dynamic_shapes=shapes, strict=False).module()
    given = inputs(3, 13)
    close(exported(**given).logits, expected(**given).logits, given["attention_mask"])


def test_longest_document_of_a_tensor_in_a_compiled_graph():
    """Dynamo cannot look up in a dictionary what it has not seen outside the graph."""
    longest = torch.compile(lambda x: longest_document(x.cumsum(0), 7), fullgraph=True, backend="eager")
    assert longest(torch.arange(3)) == 7


def test_longest_document_in_a_compiled_graph_is_read_on_the_host():
    """A graph break in each layer of a vision tower made compiled ones slower than others."""
    compiled = torch.compile(lambda x: x.sum() + longest_document(x, x.max()), fullgraph=True, backend="eager")
    for lengths in ([3, 2], [1, 4], [2, 6, 1]):
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        copy = bounds.clone()
        remember_source(copy, bounds)
        assert compiled(copy) == bounds.sum() + max(lengths)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "qwen3"])
@pytest.mark.parametrize("kernel", ["flash_attention_4", "triton", "auto"])
def test_compiled_model_with_padding_on_a_gpu(name, kernel):
    """Errors of the loss and of all gradients in bfloat16 are those of Transformers' attention, uncompiled."""
    if kernel != "auto" and (reason := KERNEL_REGISTRY.get("attention", "causal", kernel).unsupported_here()):
        pytest.skip(reason)
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = AutoConfig.for_model(name, **{**SIZES, **KINDS.get(name, {}), **sizes, "sliding_window": 50})
    torch.manual_seed(0)
    exact = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().cuda()
    ids = torch.randint(3, 64, (5, 300), device="cuda")
    padding = torch.ones_like(ids)
    padding[0, :60] = padding[1, 110:] = padding[2, 290:] = padding[2, :129] = padding[3] = 0
    # Not the token after the padding, which eager attention predicts from padding.
    labels = ids.masked_fill(padding.cumsum(-1) * padding <= 1, -100)
    wanted = train(exact, padding, labels, ids)
    eager, model = (copy.deepcopy(exact).bfloat16() for _ in range(2))
    opslot.apply(model, {"preset": "eager", "attn_implementation": kernel, "moe_implementation": "grouped_mm"})
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    plain, found, again = (train(m, padding, labels, ids) for m in (eager, compiled, model))
    for part, exact_part in wanted.items():
        allowed, error, uncompiled = ((t[part].float() - exact_part).norm() for t in (plain, found, again))
        assert error <= 2 * max(allowed, uncompiled) + 1e-3 * exact_part.norm(), part


def train(model, padding, labels, ids=IDS):
    model.zero_grad()
    loss = model(ids, attention_mask=padding, labels=labels, use_cache=False).loss
    loss.backward()
    named = {name.removeprefix("_orig_mod."): parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), **{name: gradient for name, gradient in named.items() if gradient is not None}}


@pytest.mark.parametrize("name", ["mistral", "gemma2", "deepseek_v3"])
def test_static_cache_equals_dynamic_cache_on_a_gpu(name):
    """`generate` compiles the model for a static cache."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    model = original(name).cuda()
    opslot.apply(model, "auto")
    options = {"max_new_tokens": 7, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    ids = IDS.cuda()
    padding = torch.ones_like(ids)
    padding[0, :6] = 0
    dynamic, static = (
        torch.stack(model.generate(ids, attention_mask=padding, cache_implementation=cache, **options).logits)
        for cache in ("dynamic", "static")
    )
    torch.testing.assert_close(static, dynamic, rtol=1e-3, atol=1e-3)


def test_fake_tensors():
    """Estimates of memory run a model on tensors without values."""
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mistral", **{**SIZES, **KINDS["mistral"]}))
        opslot.apply(model, {"preset": "eager", "attn_implementation": "sdpa"}, device="cpu")
        ids = torch.zeros(2, 17, dtype=torch.long)
        for given in ({"attention_mask": torch.ones_like(ids)}, {"position_ids": ids, "use_cache": False}, {}):
            model(ids, labels=ids, **given).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("shared", [False, True], ids=["per layer", "shared"])
def test_bias_that_a_layer_adds_to_its_mask_stays(shared):
    config = transformers.BeitConfig(
        **{name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
        use_relative_position_bias=not shared,
        use_shared_relative_position_bias=shared,
    )
    torch.manual_seed(0)
    model = transformers.BeitModel(config).eval()
    tables = [p for name, p in model.named_parameters() if name.endswith("relative_position_bias_table")]
    assert len(tables) == (1 if shared else config.num_hidden_layers)
    with torch.no_grad():
        for table in tables:
            table.normal_()
    images = torch.randn(2, 3, 16, 16)
    expected = model(images).last_hidden_state
    opslot.apply(model)
    torch.testing.assert_close(model(images).last_hidden_state, expected)


ENCODERS = {
    "modernbert": {"local_attention": 6, "global_attn_every_n_layers": 2},
    "gemma3_text": SLIDING | {"query_pre_attn_scalar": 8, "use_bidirectional_attention": True},
    "t5gemma": SLIDING | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": None},
}


def encoder(name):
    torch.manual_seed(0)
    if name == "t5gemma":
        halves = [transformers.T5GemmaModuleConfig(**{**SIZES, **ENCODERS[name]}) for _ in range(2)]
        config = transformers.T5GemmaConfig(encoder=halves[0], decoder=halves[1], is_encoder_decoder=False)
        return transformers.T5GemmaEncoderModel._from_config(config, attn_implementation="eager").eval()
    sizes = {key: value for key, value in SIZES.items() if name != "modernbert" or key != "num_key_value_heads"}
    config = AutoConfig.for_model(name, **{**sizes, **ENCODERS[name]})
    return transformers.AutoModel.from_config(config, attn_implementation="eager").eval()


@pytest.fixture
def masks_seen(flash_like, monkeypatch):
    """`flash_like` also for attention that is never causal."""
    spec = KERNEL_REGISTRY.get("attention", "causal", "flash_like")
    KERNEL_REGISTRY.register(dataclasses.replace(spec, variant="bidirectional"))
    return flash_like


@pytest.mark.quick("flash_like-*", "auto-")
@pytest.mark.parametrize("compiles", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("kernel", ["flash_like", "auto"])
def test_images_whose_tokens_see_each_other(kernel, compiles, masks_seen):
    """A kernel without masks would compute causal attention."""
    config = tiny_config("gemma3")
    torch.manual_seed(0)
    expected = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    model = copy.deepcopy(expected)
    spec = KERNEL_REGISTRY.get("attention", "causal", "flash_like")
    KERNEL_REGISTRY.register(dataclasses.replace(spec, priority=99), replace=True)
    opslot.apply(model, {"preset": "eager", "attn_implementation": kernel})
    model = torch.compile(model, backend="eager") if compiles else model
    types = torch.zeros_like(IDS)
    types[:, 2:7] = 1
    inputs = {"input_ids": IDS, "token_type_ids": types, "attention_mask": torch.ones_like(IDS)}
    with torch.no_grad():
        if kernel == "flash_like":
            with pytest.raises(KernelError, match=r"'flash_like' cannot apply this mask \(or_masks"):
                model(**inputs)
        else:
            torch.testing.assert_close(model(**inputs).logits, expected(**inputs).logits, rtol=1e-4, atol=1e-4)
    assert not masks_seen


def test_images_in_a_compiled_model_without_attention_mask_raise(masks_seen):
    """Transformers then makes masks of packed documents, in which the part of the images cannot be read."""
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(tiny_config("paligemma"))
    opslot.apply(model, {"preset": "eager", "attn_implementation": "flash_like"})
    types = torch.ones_like(IDS)
    types[:, :7] = 0
    inputs = {"input_ids": IDS, "position_ids": torch.arange(17)[None], "token_type_ids": types}
    with torch.no_grad(), pytest.raises(RuntimeError, match="tokens see later ones"):
        torch.compile(model, backend="eager")(**inputs)
    assert not masks_seen


@pytest.mark.parametrize("name", ENCODERS)
def test_masks_with_windows_to_both_sides_are_not_dense(name, masks_seen):
    expected = encoder(name)
    with torch.no_grad():
        model = flash_like_model(expected)
        separate = torch.cat([expected(ids).last_hidden_state for ids in IDS.split([9, 8], 1)], 1)
        close(model(IDS, position_ids=POSITIONS, **DOCUMENTS).last_hidden_state, separate)
    assert masks_seen
    assert all(mask is None for mask in masks_seen)


@pytest.mark.quick("*-triton-compiled", "gemma3_text-auto-compiled", "*-")
@pytest.mark.parametrize("compiles", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize(
    ("name", "kernel"),
    # Transformers does not let T5Gemma use SDPA.
    [
        (name, kernel)
        for name in ENCODERS
        for kernel in ("sdpa", "triton", "auto")
        if (name, kernel) != ("t5gemma", "sdpa")
    ],
)
def test_windows_to_both_sides_equal_transformers(name, kernel, compiles):
    """Also with padding between tokens, where removing it would move a window."""
    if kernel == "triton" and (reason := KERNEL_REGISTRY.get("attention", "causal", kernel).unsupported_here()):
        pytest.skip(reason)
    expected = encoder(name)
    model = copy.deepcopy(expected)
    opslot.apply(model, {"preset": "eager", "attn_implementation": kernel})
    model = torch.compile(model, backend="eager") if compiles else model
    between, around = torch.ones_like(IDS), torch.ones_like(IDS)
    between[1, 4:6] = around[0, 13:] = around[1, :6] = 0
    with torch.no_grad():
        for padding in (None, around) if kernel == "triton" else (None, around, between):
            found = model(IDS, attention_mask=padding).last_hidden_state
            close(found, expected(IDS, attention_mask=padding).last_hidden_state, padding)


@pytest.mark.parametrize("name", ["modernbert", "t5gemma"])
def test_a_window_is_that_of_the_mask_not_of_the_module(name):
    """T5Gemma's encoder passes the number of the mask, ModernBERT one more, for a distance up to that number."""
    sizes = {"attention_mask": None, "allow_is_bidirectional_skip": True, "local_size": 4}
    function = masking_utils.sliding_window_bidirectional_mask_function(4)
    make = masks.MaskFunction(masking_utils.flash_attention_mask, "flash_like")
    layout = make(1, 9, 9, mask_function=function, **sizes)
    query = torch.zeros(1, 2, 9, 4)
    passed = 5 if name == "modernbert" else 4
    assert layout.arguments(query, {"sliding_window": passed})["sliding_window"] == 5
