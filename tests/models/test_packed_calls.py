"""Models called with `cu_seq_lens_q`: they keep documents apart, or raise."""

import inspect

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

import opslot
from opslot._base.errors import ConfigError, KernelError
from opslot.ops._common.documents import positions_restart
from opslot.verify.random_model import random_model
from opslot.verify.tiny import tiny_config

LENGTHS = (7, 9)


def packed(model, **more):
    """Token ids of two documents in one row, with their boundaries."""
    config = model.config.get_text_config()
    ids = torch.randint(5, min(config.vocab_size, 64), (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    cu_seqlens = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32)
    longest = {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
    return {"input_ids": ids, "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, **longest, **more}


def positions():
    return torch.cat([torch.arange(length) for length in LENGTHS])[None]


def without_kernels(arch):
    """A tiny model whose differences between tokens are not small."""
    model = random_model(tiny_config(arch)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) / 5)
    return model


def with_kernels(arch, ops="eager"):
    model = without_kernels(arch)
    opslot.apply(model, ops)
    return model


@pytest.mark.parametrize("ops", ["eager", "auto"])
@pytest.mark.parametrize("arch", ["llama", "gpt2", "opt", "gemma2", "gpt_oss", "bloom"])
def test_boundaries_alone_separate_documents(arch, ops):
    model = with_kernels(arch, ops)
    batch = packed(model)
    ids = batch["input_ids"]
    with torch.no_grad():
        found = model(**batch).logits
        alone = [model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, 1)]
    torch.testing.assert_close(found, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


AXES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v_moe", "ernie4_5_vl_moe", "qwen2_5_omni_thinker", "qwen3_5"]


@pytest.mark.quick("qwen2_5_vl-eager", "qwen2_5_vl-auto", "qwen3_5-eager")
@pytest.mark.parametrize("ops", ["eager", "auto"])
@pytest.mark.parametrize("arch", AXES)
def test_positions_that_restart_separate_documents_of_models_with_several_axes(arch, ops):
    model = with_kernels(arch, ops)
    both = packed(model, position_ids=positions())
    ids = both["input_ids"]
    boundaries = {name: value for name, value in both.items() if name != "position_ids"}
    calls = [both, boundaries, {"input_ids": ids, "position_ids": positions()}]
    with torch.no_grad():
        alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, 1)], 1)
        for call in calls:
            torch.testing.assert_close(model(**call).logits, alone, rtol=1e-4, atol=1e-4)


def test_models_whose_masks_drop_positions_need_a_kernel():
    model = with_kernels("hunyuan_vl", "auto")
    batch = {"input_ids": packed(model)["input_ids"], "position_ids": positions()}
    with torch.no_grad():
        alone = [model(input_ids=part, use_cache=False).logits for part in batch["input_ids"].split(LENGTHS, 1)]
        torch.testing.assert_close(model(**batch).logits, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)
        opslot.bind(model, "eager")
        with pytest.raises(KernelError, match="HunYuanVLTextModel cannot keep packed documents"):
            model(**batch)
        opslot.restore(model)
        model(**batch)


@pytest.mark.parametrize(
    ("arch", "given", "why"),
    [
        ("llama", {"position_ids": torch.arange(sum(LENGTHS))[None]}, "do not restart at token 7"),
        ("llama", {"position_ids": positions(), "use_cache": True}, "where it fills a cache.*leave out use_cache"),
        ("qwen2_5_vl", {"position_ids": positions().expand(3, -1, -1)}, "do not restart at token 7"),
    ],
)
def test_boundaries_that_masks_of_transformers_would_ignore_raise(arch, given, why):
    model = with_kernels(arch)
    batch = packed(model, **given)
    with pytest.raises(KernelError, match=rf"(?s)cannot keep packed documents.*{why}"):
        model(**batch)
    opslot.bind(model, {"attn_implementation": "sdpa"})
    assert _leaks(model, batch) < 1e-5


@pytest.mark.parametrize("given", [{}, {"position_ids": positions()}])
@pytest.mark.parametrize(
    ("arch", "ops", "why"),
    [
        ("rwkv", "auto", "RwkvSelfAttention has a ZeroPad2d"),
        ("openai-gpt", "auto", "Attention computes attention itself"),
        ("roformer", "auto", "RoFormerSelfAttention computes attention itself"),
        ("bert", "eager", "Transformers' sdpa ignores cu_seq_lens_q"),
        ("eurobert", "eager", "Transformers' sdpa ignores cu_seq_lens_q"),
    ],
)
def test_models_that_mix_documents_raise(arch, ops, why, given):
    model = with_kernels(arch, ops)
    with pytest.raises(KernelError, match=rf"(?s)cannot keep packed documents \(cu_seq_lens_q\) apart.*{why}"):
        model(**packed(model, **given))
    model(input_ids=packed(model)["input_ids"])


@pytest.mark.quick("rwkv-*", "bart-*")
@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    "arch",
    [
        "rwkv",
        "bart",
        "trocr",
        "blt",
        "cpmant",
        "openai-gpt",
        "roformer",
        "rembert",
        "megatron-bert",
        "big_bird",
        "bigbird_pegasus",
    ],
)
def test_models_that_mix_documents_raise_for_positions_that_restart(arch, mode):
    model = with_kernels(arch).train(mode)
    ids = packed(model)["input_ids"]
    with pytest.raises(KernelError, match=r"cannot keep packed documents \(position_ids that restart\) apart"):
        model(input_ids=ids, position_ids=positions())


@pytest.mark.parametrize("arch", ["rwkv", "openai-gpt", "roformer", "bigbird_pegasus"])
@pytest.mark.parametrize("fill", [0, 1])
def test_positions_of_padding_do_not_raise(arch, fill):
    model = with_kernels(arch)
    ids = packed(model)["input_ids"]
    padding, tokens = torch.full((3,), fill), torch.arange(sum(LENGTHS) - 3)
    for parts in ([padding, tokens], [tokens, padding]):
        model(input_ids=ids, position_ids=torch.cat(parts)[None])


def test_positions_of_a_device_are_not_read():
    model = with_kernels("openai-gpt").to("meta")
    ids = packed(model)["input_ids"].to("meta")
    model(input_ids=ids, position_ids=positions().to("meta"))


@pytest.mark.parametrize(
    ("given", "restarts"),
    [
        ([0, 1, 2, 0, 1], True),
        ([2, 3, 4, 2, 3], True),
        ([0, 1, 2, 3, 4], False),
        ([1, 1, 1, 0, 1], False),
        ([0, 0, 0, 1, 2], False),
        ([0, 1, 2, 1, 1], False),
        ([0, 1, 2, 2, 3], False),
        ([0, 1, 2, 0, 0], False),
        ([0, 1, 1, 0, 1], True),
    ],
)
def test_restarting_positions(given, restarts):
    rising = torch.arange(len(given))
    assert positions_restart(None, {"position_ids": torch.tensor([given])}, "") is restarts
    assert positions_restart(None, {"position_ids": torch.stack([rising, torch.tensor(given)])}, "") is restarts


def test_encoder_decoder_models_raise():
    model = transformers.BartForConditionalGeneration(tiny_config("bart"))
    opslot.apply(model)
    batch = packed(model)
    with pytest.raises(KernelError, match="BartForConditionalGeneration cannot keep packed documents"):
        model(**batch, decoder_input_ids=batch["input_ids"])


def test_padded_rows_with_boundaries_raise():
    model = with_kernels("llama")
    batch = packed(model, position_ids=positions())
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    with pytest.raises(KernelError, match=r"(?s)and position_ids where it gets an attention_mask.*leave out attention"):
        model(**batch)


def test_other_kernels_and_no_slots_remove_the_errors():
    model = with_kernels("bert")
    batch = packed(model, position_ids=positions())
    opslot.bind(model, {"attn_implementation": "sdpa"})
    model(**batch)
    opslot.bind(model, "eager")
    with pytest.raises(KernelError):
        model(**batch)
    opslot.restore(model)
    model(**batch)
    rwkv = with_kernels("rwkv")
    opslot.restore(rwkv)
    rwkv(**packed(rwkv))


def _leaks(model, batch):
    """How far the second document's logits move with the tokens of the first one."""
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][:, : LENGTHS[0]] = batch["input_ids"][:, : LENGTHS[0]].roll(1, 1)
    with torch.no_grad():
        first, second = (model(**x).logits[:, LENGTHS[0] :] for x in (batch, other))
    return float((first - second).abs().max() / first.abs().max())


OF_TEXT = sorted({*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES})
# Models of parts alone, without the inputs that the other parts give them, or without a language.
NOT_CALLED = {"gemma4_assistant", "gemma4_unified_assistant", "xmod"}
# Their models make the cache of the decoder in them.
OUTER_CACHE = ["idefics2", "idefics3", "smolvlm"]


@pytest.mark.quick("bert-*", "ctrl-*", "longcat_flash-eager", "idefics3-eager")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ops", ["eager", "auto"])
@pytest.mark.parametrize("arch", [*(arch for arch in OF_TEXT if arch not in NOT_CALLED), *OUTER_CACHE])
def test_positions_that_restart_separate_documents_or_raise(arch, ops):
    """Also while a cache could be filled, and while the model is trained."""
    try:
        model = without_kernels(arch)
    except Exception as error:  # Transformers builds none from a tiny config, or needs another package
        pytest.skip(f"{type(error).__name__}: {error}")
    try:
        opslot.apply(model, ops)
    except ConfigError as error:
        if "found nothing to bind" not in str(error):
            raise
        pytest.skip("without slots")
    without_dropout(model)
    ids = packed(model)["input_ids"]
    calls = [(False, {}), (True, {})]
    if "use_cache" in inspect.signature(type(model).forward).parameters:
        calls.append((False, {"use_cache": False}))
    for mode, more in calls:
        model.train(mode)
        found, error = call(model, input_ids=ids, position_ids=positions(), **more)
        if found is None:
            assert "cannot keep packed documents (position_ids that restart) apart" in error
            continue
        split = zip(ids.split(LENGTHS, 1), positions().split(LENGTHS, 1), strict=True)
        alone = [call(model, input_ids=part, position_ids=own, **more)[0] for part, own in split]
        torch.testing.assert_close(found, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


def call(model, **inputs):
    """The logits and ""; or None and the error of a kernel."""
    with torch.no_grad():
        try:
            return model(**inputs).logits, ""
        except KernelError as error:
            return None, str(error)


def without_dropout(model):
    for module in model.modules():
        rates = [name for name, value in vars(module).items() if isinstance(value, float) and "drop" in name]
        for name in [*rates, *(["p"] if isinstance(module, torch.nn.Dropout) else [])]:
            setattr(module, name, 0.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ops", ["eager", "auto"])
def test_no_model_of_text_mixes_documents(ops):
    mixed, separated = {}, 0
    for arch in OF_TEXT:
        try:
            model = with_kernels(arch, ops)
        except Exception:
            # Without slots, or with sizes that no tiny config has.
            continue
        for more in ({}, {"position_ids": positions()}):
            try:
                leak = _leaks(model, packed(model, use_cache=False, **more))
            except Exception:
                continue
            separated += 1
            if leak > 1e-5:
                mixed[arch, *more] = leak
    assert mixed == {}
    assert separated > 150, separated
