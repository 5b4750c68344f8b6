"""Discovered slots: eager equals Transformers bit for bit, kernels are correct, and restore removes them."""

from __future__ import annotations

import ast
import copy
import importlib

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import opslot
from opslot._base.errors import ConfigError
from opslot.distributed import ParallelState
from opslot.models import MODELING_REGISTRY
from opslot.models.discovery import discover, sequences
from opslot.models.parallelize import parallel_plan
from opslot.patchgen.engine import generate
from opslot.patchgen.source import installed_release
from opslot.slots.protocol import keeps_sequences
from opslot.verify import check_architecture
from opslot.verify.random_model import class_of
from opslot.verify.tiny import tiny_config
from tests.models.sizes import MIXED

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"head_dim": 8}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "first_k_dense_replace": 1}
GEMMA4 = HEADS | {
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["full_attention", "full_attention"],
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

# model_type -> additional sizes, and the slots that must be found.
MODELS = {
    "mistral": (HEADS, {"rms_norm/standard", "rms_norm/fused_add", "cross_entropy_loss/causal", "attention/causal"}),
    "gemma3_text": (HEADS, {"rms_norm/fused_add_weight_offset", "rotary_pos_emb/full", "swiglu_mlp/standard"}),
    "nanochat": (HEADS, {"rms_norm/unweighted", "rotary_pos_emb/full", "attention/causal"}),
    "phi3": ({}, {"swiglu_mlp/fused_gate_up", "rms_norm/fused_add", "rotary_pos_emb/partial", "attention/causal"}),
    "mixtral": ({"num_local_experts": 4}, {"moe_experts/standard", "load_balancing_loss/standard"}),
    "glm4_moe": (HEADS | MOE, {"rotary_pos_emb/partial", "moe_experts/standard"}),
    "gpt_oss": (
        HEADS | {"num_local_experts": 4},
        {
            "rms_norm/cast_after_weight",
            "rms_norm/fused_add_cast_after_weight",
            "rotary_pos_emb/half_cos_sin",
            "moe_experts/biased",
        },
    ),
    "olmo2": ({}, {"rms_norm/cast_after_weight", "rotary_pos_emb/full_fp32", "attention/causal"}),
    "helium": (HEADS, {"rms_norm/cast_after_weight", "rms_norm/fused_add_cast_after_weight", "rotary_pos_emb/gptj"}),
    "glm4": (HEADS, {"rms_norm/standard", "rotary_pos_emb/gptj", "attention/causal"}),
    "cohere2": (HEADS, {"rotary_pos_emb/gptj_fp32", "attention/causal"}),
    "ernie4_5": (HEADS, {"rms_norm/standard", "rotary_pos_emb/gptj_fp32"}),
    "gemma4_text": (GEMMA4, {"rotary_pos_emb/single"}),
    "modernbert-decoder": ({}, {"rotary_pos_emb/full_fp32"}),
    "qwen3_next": (HEADS | MIXED, {"rms_norm/gated", "rms_norm/weight_offset", "moe_experts/standard"}),
    "moshi": (HEADS, {"rms_norm/cast_after_weight"}),
    "deepseek_v3": (MOE | LATENT | {"n_group": 2, "topk_group": 1}, {"rotary_pos_emb/gptj_to_neox"}),
}


def config_of(model_type):
    return AutoConfig.for_model(model_type, **SIZES | MODELS.get(model_type, [HEADS])[0])


def step(model, ids, **inputs):
    """Loss and gradients of one training step."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, **inputs).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, wanted):
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    assert all(torch.equal(found[1][name], grad) for name, grad in wanted[1].items())


@pytest.mark.quick("gpt_oss", "qwen3_next", "deepseek_v3", "modernbert-decoder", "cohere2", "gemma4_text")
@pytest.mark.parametrize("model_type", MODELS)
def test_discovered_slots_train_like_transformers(model_type):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(model_type)).train()
    ids = torch.randint(3, 64, (2, 20))
    before, attention = type(model), model.config._attn_implementation
    wanted = step(model, ids)

    report = opslot.apply(model, "eager")
    assert type(model).__module__ == f"opslot.generated.{before.__module__.split('.')[-2]}"
    assert {f"{row.op}/{row.variant}" for row in report.rows} >= MODELS[model_type][1]
    assert_same(step(model, ids), wanted)

    report = opslot.apply(model, "auto")
    assert {row.chosen for row in report.rows} - {"eager"}, "some kernel serves"
    loss, grads = step(model, ids)
    assert loss == pytest.approx(wanted[0], rel=1e-6)
    for name, grad in wanted[1].items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")

    opslot.restore(model)
    assert type(model) is before
    assert model.config._attn_implementation == attention
    assert_same(step(model, ids), wanted)


WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "vocab_size": 512}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("model_type", MODELS)
def test_discovered_slots_train_with_gpu_kernels(model_type):
    """In bf16, the error of loss and gradients under `auto` against fp32 is at most twice that of Transformers."""
    torch.manual_seed(0)
    sizes = SIZES | MODELS[model_type][0] | WIDE
    latent = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
    if "q_lora_rank" in sizes:
        sizes |= latent | {"head_dim": 64}
    if "moe_intermediate_size" in sizes:
        sizes["moe_intermediate_size"] = 128
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes)).train().cuda()
    ids = torch.randint(3, 512, (2, 160), device="cuda")
    # Without a mask, Moshi's eager attention is not causal in Transformers 5.17.
    mask = {"attention_mask": torch.ones_like(ids)}
    # Transformers' torch code, also where it would run fla, which stops on Hopper with Triton 3.4 to 3.7.0.
    opslot.apply(model, "eager")
    exact = step(model, ids, **mask)
    model.bfloat16()
    eager = step(model, ids, **mask)
    report = opslot.apply(model, "auto")
    assert {row.chosen for row in report.rows} - {"eager", "torch_fused"}
    found = step(model, ids, **mask)
    assert abs(found[0] - exact[0]) <= 2 * abs(eager[0] - exact[0]) + 1e-3

    def distance(grads):
        """Relative error over all gradients together: rounding may change the routing of single tokens."""
        gaps = [(grads[name].float() - grad).square().sum() for name, grad in exact[1].items()]
        return (sum(gaps) / sum(grad.square().sum() for grad in exact[1].values())).sqrt().item()

    assert distance(found[1]) <= 2 * distance(eager[1])


@pytest.mark.parametrize("model_type", ["gpt_oss", "helium"])
def test_fused_add_rms_norm_rounds_like_the_norm(model_type, monkeypatch):
    from opslot.ops.rms_norm import triton

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(model_type)).train()
    ids = torch.randint(3, 64, (2, 20))
    wanted = step(model, ids)
    rounded_last, inner = [], triton._FusedAddRMSNorm.apply
    monkeypatch.setattr(triton._FusedAddRMSNorm, "apply", lambda *args: rounded_last.append(args[-1]) or inner(*args))
    opslot.apply(model, {"preset": "eager", "rms_norm_implementation": "triton"})
    loss, grads = step(model, ids)
    assert rounded_last == [True, True]
    assert loss == pytest.approx(wanted[0], rel=1e-6)
    for name, grad in wanted[1].items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


DENSE = {
    "RMSNorm": {"rms_norm": ("rms_norm", "standard")},
    "MLP": {"swiglu_mlp": ("swiglu_mlp", "standard")},
    "Attention": {"rotary_pos_emb": ("rotary_pos_emb", "full")},
    "DecoderLayer": {"rms_norm": ("rms_norm", "fused_add")},
    "ForCausalLM": {"cross_entropy_loss": ("cross_entropy_loss", "causal")},
    "ForSequenceClassification": {"cross_entropy_loss": ("cross_entropy_loss", "sequence_classification")},
    "ForTokenClassification": {"cross_entropy_loss": ("cross_entropy_loss", "sequence_classification")},
}
NORMED_HEADS = {
    "Attention": {
        "rotary_pos_emb": ("rotary_pos_emb", "full"),
        "rotary_pos_emb_norm": ("rotary_pos_emb", "norm_full"),
    },
}
EXPERTS = {
    "Experts": {"moe_experts": ("moe_experts", "standard")},
    "ForCausalLM": {
        "cross_entropy_loss": ("cross_entropy_loss", "causal"),
        "load_balancing_loss": ("load_balancing_loss", "standard"),
    },
}


@pytest.mark.parametrize(
    ("arch", "prefix", "slots"),
    [
        ("llama", "Llama", DENSE),
        ("qwen2", "Qwen2", DENSE),
        ("qwen3", "Qwen3", DENSE | NORMED_HEADS),
        ("seed_oss", "SeedOss", DENSE),
        ("mistral", "Mistral", DENSE),
        ("qwen3_moe", "Qwen3Moe", DENSE | NORMED_HEADS | EXPERTS),
    ],
)
def test_slots_of_generated_classes(arch, prefix, slots):
    generated = importlib.import_module(f"opslot.generated.{arch}")
    found = {
        name: vars(value).get("_opslot_slots")
        for name, value in vars(generated).items()
        if isinstance(value, type) and value.__name__ == name
    }
    assert {name: slots for name, slots in found.items() if slots} == {f"{prefix}{k}": v for k, v in slots.items()}
    assert not any("_opslot_skipped" in vars(value) for value in vars(generated).values() if isinstance(value, type))
    assert not discover(arch).skips


@pytest.mark.parametrize(
    ("arch", "slot"),
    [
        ("gpt2", "GPT2Attention attention/causal"),
        ("t5", "T5LayerNorm.forward rms_norm/standard"),
        ("gemma4", "Gemma4RMSNorm.forward rms_norm/cast_after_weight"),
        ("deepseek_v4", "DeepseekV4UnweightedRMSNorm.forward rms_norm/unweighted"),
        ("inkling2", "Inkling2UnweightedRMSNorm.forward rms_norm/unweighted"),
        ("pp_doclayout_v2", "PPDocLayoutV2SelfAttention attention/bidirectional"),
    ],
)
def test_slots_of_further_forms(arch, slot):
    assert slot in discover(arch).patch.slots


@pytest.mark.parametrize(
    ("arch", "attention"), [("internvl", "InternVLVisionAttention"), ("ovis2", "Ovis2VisionAttention")]
)
def test_attention_of_towers_that_make_no_masks_has_kernels(arch, attention):
    found = discover(arch)
    assert (attention, "attention/bidirectional") in {(match.symbol, str(match)) for match in found.matches}
    # Masks of queries for training, which have no batch dim.
    assert "RTDetrSelfAttention" in {skip.symbol for skip in discover("rt_detr").skips}


def test_norms_that_are_not_layer_norms_are_not_skipped_as_such():
    assert "T5LayerNorm" not in {skip.symbol for skip in discover("t5").skips}
    assert "DetrFrozenBatchNorm2d" not in {skip.symbol for skip in discover("detr").skips}


@pytest.mark.parametrize("arch", ["rembert", "roformer"])
def test_layers_with_bidirectional_masks_are_not_those_of_a_decoder(arch):
    model = AutoModelForCausalLM.from_config(tiny_config(arch))
    opslot.apply(model, "eager")
    assert keeps_sequences(model) == "it has no decoder layers"


def skipped(arch, name):
    return getattr(importlib.import_module(f"opslot.generated.{arch}"), name)._opslot_skipped


def test_skips_are_attributes_of_the_owning_class():
    attention = ("attention", "DogeAttention", "changes the attention mask")
    assert skipped("doge", "DogeAttention") == (attention,)
    reason = "changes the logits between head and loss: `logits[:, :, image_tokens] = torch.finfo(logits.dtype).min`"
    loss = ("cross_entropy_loss", "ChameleonForConditionalGeneration", reason)
    assert skipped("chameleon", "ChameleonForConditionalGeneration") == (loss,)


@pytest.mark.parametrize(
    ("arch", "name", "op", "reason"),
    [
        ("chameleon", "ChameleonForConditionalGeneration", "cross_entropy_loss", "changes the logits between head and"),
        ("codegen", "CodeGenPreTrainedModel", "rotary_pos_emb", "rotates in another way"),
        ("doge", "DogeAttention", "attention", "changes the attention mask"),
    ],
)
def test_unrecognized_parts_are_skipped_with_a_reason(arch, name, op, reason):
    (found,) = [why for skipped_op, _, why in skipped(arch, name) if skipped_op == op]
    assert reason in found


def test_skipped_attention_keeps_transformers_implementation():
    model = AutoModelForCausalLM.from_config(config_of("doge"))
    opslot.apply(model)
    assert model.config._attn_implementation == "sdpa"
    (row,) = [row for row in opslot.explain(model).rows if row.op == "attention"]
    assert row.chosen == "eager"
    assert "DogeAttention changes the attention mask" in row.why
    with pytest.raises(ConfigError, match="attn_implementation='sdpa': DogeAttention changes the attention mask"):
        opslot.apply(model, {"attn_implementation": "sdpa"})


PACKED = [
    "gemma2",
    "glm4_moe",
    "mixtral",
    "phi3",
    "cwm",
    "olmo2",
    "helium",
    "glm4",
    "ernie4_5",
    "mistral",
    "deepseek_v3",
    "gemma3_text",
    "llama4_text",
    "olmo3",
    "mimo_v2_flash",
    "granite_swa",
]


@pytest.mark.quick("gemma2", "llama4_text", "deepseek_v3", "mixtral")
@pytest.mark.parametrize("model_type", PACKED)
def test_packed_documents_do_not_attend_to_each_other(model_type):
    torch.manual_seed(0)
    model = opslot.build_foundation_model(config_of(model_type)).eval()
    assert keeps_sequences(model) is None
    first, second = torch.randint(3, 64, (1, 9)), torch.randint(3, 64, (1, 7))
    places = torch.cat([torch.arange(9), torch.arange(7)])[None]
    with torch.no_grad():
        packed = model(input_ids=torch.cat([first, second], dim=1), position_ids=places, use_cache=False).logits
        separate = torch.cat([model(input_ids=document).logits for document in (first, second)], dim=1)
    torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arch", "why"),
    [
        ("recurrent_gemma", "RecurrentGemmaRecurrentBlock has a Conv1d, which may mix tokens"),
        ("doge", "DogeCDMoE calls matmul of activations, which may mix tokens"),
        ("blt", "BltCrossAttention attends to other states than its own"),
        ("marian", "MarianDecoder counts the positions of each row, and takes no position_ids"),
    ],
)
def test_models_that_may_mix_tokens_elsewhere_state_the_reason(arch, why):
    text = generate(discover(arch).patch, installed_release())
    assert f"_opslot_keeps_sequences = '{why}" in text


@pytest.mark.parametrize(
    ("arch", "why"),
    [
        ("gemma3", "its language model is not separate from its encoder"),
        ("bert", "it has no decoder layers"),
    ],
)
def test_models_whose_layers_are_unknown_state_the_reason(arch, why):
    assert f"_opslot_unknown_layers = '{why}'" in generate(discover(arch).patch, installed_release())


@pytest.mark.parametrize("arch", ["cohere2_moe", "phimoe", "dbrx", "jetmoe", "kolibri1"])
def test_code_that_acts_per_token_does_not_prevent_packing(arch):
    """Errors, autograd functions, and reviewed methods that call functions of several tokens."""
    text = generate(discover(arch).patch, installed_release())
    assert "_opslot_keeps_sequences" not in text


@pytest.mark.quick("dbrx", "gpt2")
@pytest.mark.parametrize("arch", ["dbrx", "ernie4_5_vl_moe", "gemma3n_text", "gpt2", "jetmoe", "moshi", "zamba"])
def test_packed_documents_equal_the_documents_alone(arch):
    found = check_architecture(arch, checks=["packed"])["packed"]
    assert found.result == "passed", found.detail


@pytest.mark.parametrize("arch", ["gpt_oss", "afmoe"])
def test_masks_that_upstream_makes_without_positions_separate_documents(arch):
    upstream = AutoModelForCausalLM.from_config(config_of(arch)).eval()
    model = copy.deepcopy(upstream)
    opslot.apply(model, "eager")
    assert keeps_sequences(model) is None
    ids = torch.randint(3, model.config.vocab_size, (1, 12))
    with torch.no_grad():
        packed = model(ids, position_ids=torch.tensor([[*range(5), *range(7)]]), use_cache=False).logits
        alone = torch.cat([upstream(part).logits for part in ids.split([5, 7], 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("returned", "selects"),
    [
        ("scores.topk(2).indices", True),
        ("scores.topk(2).indices + 1", True),
        ("unmasked.topk(2).indices", False),
        ("scores @ keys", False),
    ],
)
def test_selection_under_the_mask_does_not_mix_documents(returned, selects):
    method = ast.parse(
        "def forward(self, q, keys, attention_mask):\n"
        "    unmasked = scores = q @ keys.mT\n"
        "    scores = scores.masked_fill(~attention_mask, float('-inf'))\n"
        f"    return {returned}"
    ).body[0]
    assert sequences._selects_under_mask(method) == selects


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of("doge"), "DogeAttention changes"),
        (tiny_config("phi4_multimodal"), "it places features of images or audio in sequences inside"),
        (tiny_config("eurobert"), r"the labels of shards are shifted, and its loss \(ForMaskedLM\) compares them"),
    ],
)
def test_sequences_of_such_models_are_not_sharded(config, reason):
    with torch.device("meta"):
        model = class_of(config)._from_config(config)
    opslot.apply(model, "eager", device="cpu")
    with pytest.raises(ConfigError, match=rf"cannot be sharded \(sp=2\): {reason}"):
        opslot.parallelize(model, ParallelState(sp=2))


def test_build_save_and_load(tmp_path):
    built = opslot.build_foundation_model(config_of("glm4_moe"))
    assert type(built).__module__ == "opslot.generated.glm4_moe"
    assert "glm4_moe" in MODELING_REGISTRY
    built.save_pretrained(tmp_path)
    again = opslot.build_foundation_model(tmp_path, tmp_path)
    upstream = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, weight in upstream.state_dict().items():
        assert torch.equal(built.state_dict()[name], weight), name
        assert torch.equal(again.state_dict()[name], weight), name


def test_expert_parallelism_shards_experts_with_slots():
    built = opslot.build_foundation_model(config_of("glm4_moe"), init_device="meta")
    (plan,) = parallel_plan(built).extra_parallel_plan.values()
    # The first layer is dense.
    assert set(plan) == {f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}

    class Own(type(built)):
        pass

    built.__class__ = Own
    assert parallel_plan(built).extra_parallel_plan == {"ep": plan}


def test_model_without_slots_raises():
    config = AutoConfig.for_model("xlm", emb_dim=32, n_layers=1, n_heads=2, vocab_size=64)
    with pytest.raises(ConfigError, match="found nothing to bind"):
        opslot.apply(AutoModelForCausalLM.from_config(config))
    # It is built with the slots that any torch module has.
    model = opslot.build_foundation_model(config, ops_implementation={"layer_norm_implementation": "eager"})
    assert {row.op for row in opslot.explain(model) if row.slot} == {"layer_norm"}
    with pytest.raises(ConfigError, match="attention of MultiHeadAttention has no slot: it computes attention itself"):
        opslot.build_foundation_model(config, ops_implementation={"attn_implementation": "sdpa"})


def test_model_without_slots_gets_the_kernels_of_any_torch_module():
    config = AutoConfig.for_model("xlm", emb_dim=32, n_layers=1, n_heads=2, vocab_size=64)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(4, 16).view(2, 6)
    expected = model(ids).logits
    assert {row.chosen for row in opslot.apply(model, {"linear_implementation": "fp8"}) if row.op == "linear"} == {
        "fp8"
    }
    assert not torch.equal(model(ids).logits, expected)
    # A model that has kernels can be applied to again.
    assert {row.chosen for row in opslot.apply(model, "eager") if row.slot} == {"eager"}
    assert torch.equal(model(ids).logits, expected)
    named = {"linear_implementation": "fp8", "attn_implementation": "sdpa"}
    with pytest.raises(ConfigError, match="attention of MultiHeadAttention has no slot: it computes attention itself"):
        opslot.apply(model, named)


@pytest.mark.parametrize(
    "arch",
    ["axk2", "codegen", "diffusion_gemma", "doge", "hy_v4", "lasr", "lightglue", "mlcd", "pegasus_x"],
)
def test_similar_code_is_skipped(arch):
    found = discover(arch)
    text = generate(found.patch, installed_release())
    compile(text, arch, "exec")
    skips = {skip.symbol.split(",")[0]: skip for skip in found.skips}
    unlike = {
        "axk2": ("AXK2GatedRMSNorm", "another norm"),
        # Without a mask, its layers with a window see all keys.
        "diffusion_gemma": ("DiffusionGemmaDecoderTextAttention", "makes by the implementation's name"),
        "hy_v4": ("HYV4UnweightedRMSNorm", "another norm"),
        "doge": ("load_balancing_loss_func", "computes another loss"),
        # The same code as Cohere's, but the angles are learned.
        "lightglue": ("apply_rotary_pos_emb", "or learned angles"),
        # Its convolution zeroes the padding that the mask of attention hides.
        "lasr": ("LasrEncoderAttention", "gets masks that LasrEncoderConvolutionModule reads too"),
        # The angles of its class token are a parameter.
        "mlcd": ("apply_rotary_pos_emb_vision", "rotates by trained angles"),
        "codegen": ("apply_rotary_pos_emb", "rotates in another way"),
        # Its decoder's attention has is_causal=False and gets causal masks, which kernels do not.
        "pegasus_x": ("PegasusXAttention", "is causal by its mask alone"),
    }
    symbol, why = unlike[arch]
    assert why in skips[symbol].reason
    assert (symbol, skips[symbol].op) not in {(match.symbol, match.op) for match in found.matches}
