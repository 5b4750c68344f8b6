"""FLOPs of a training step, against counts by hand and torch's own counter."""

import inspect
import math

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import opslot
from opslot._base.errors import ConfigError
from opslot.models.flop_modules import AttentionShape
from opslot.models.flops import FlopCounter, audio_lengths, document_lengths, image_lengths, visible_pairs
from opslot.trainer.processors import multimodal_class
from opslot.verify.random_model import random_model
from opslot.verify.tiny import tiny_config
from tests import omni

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCABULARY, LAYERS = 32, 4, 2, 8, 48, 64, 4
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


def make(model_type, device="cpu", **fields):
    sizes = {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": MLP,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": LAYERS,
    }
    config = AutoConfig.for_model(model_type, **sizes | fields)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def measured(model, length):
    """FLOPs of a step as torch counts them: eager attention computes every pair of tokens."""
    # Beyond special tokens, such as placeholders of images.
    tokens = torch.randint(32, VOCABULARY, (1, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return counter.get_total_flops()


def with_every_pair(count, length):
    """The total of a causal model if no pair of query and key were masked."""
    return count.total + count.parts["attention"].total * (2 * length / (length + 1) - 1)


def attention_linears(kv_heads=KV_HEADS, query_factor=1):
    return HIDDEN * HEAD_DIM * (HEADS * query_factor + 2 * kv_heads + HEADS)


def test_dense_model_equals_hand_count():
    count = opslot.count_flops(make("qwen3", "meta"), [10, 6])
    tokens, pairs = 16, 10 * 11 // 2 + 6 * 7 // 2
    linear = 2 * tokens * LAYERS * (attention_linears() + 3 * HIDDEN * MLP)
    assert count.parts["linear"] == (linear, 2 * linear)
    head = 2 * tokens * HIDDEN * VOCABULARY
    assert count.parts["head"] == (head, 2 * head)
    attention = 2 * 2 * pairs * LAYERS * HEADS * HEAD_DIM
    assert count.parts["attention"] == (attention, 2 * attention)
    assert count.total == 3 * (linear + head + attention)
    assert count.tokens == tokens
    assert count.uncounted == ()


def test_moe_model_equals_hand_count():
    count = opslot.count_flops(make("qwen3_moe", "meta", num_experts=8, **MOE), 16)
    experts = 2 * 16 * LAYERS * 2 * 3 * HIDDEN * 16
    router = 2 * 16 * LAYERS * HIDDEN * 8
    assert count.parts["experts"] == (experts, 2 * experts)
    assert count.parts["router"] == (router, 2 * router)
    assert count.parts["linear"].forward == 2 * 16 * LAYERS * attention_linears()


@pytest.mark.parametrize("applied", [False, True])
def test_hybrid_model_equals_hand_count(applied):
    model = make(
        "qwen3_next",
        num_experts=8,
        shared_expert_intermediate_size=16,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        **MOE,
    )
    if applied:
        opslot.apply(model)
    count = opslot.count_flops(model, [16])
    # Three of the four layers have the gated delta rule.
    assert count.parts["delta rule"].forward == 16 * 3 * 4 * 6 * 8 * 16
    conv_channels = 2 * 2 * 8 + 4 * 16
    assert count.parts["convolution"].forward == 2 * 16 * 3 * conv_channels * 4
    assert count.parts["shared experts"].forward == 2 * 16 * LAYERS * 3 * HIDDEN * 16
    projections = 3 * (HIDDEN * (2 * 2 * 8 + 2 * 4 * 16) + HIDDEN * 2 * 4 + 4 * 16 * HIDDEN)
    assert count.parts["linear"].forward == 2 * 16 * (projections + attention_linears(query_factor=2))
    assert count.parts["attention"].forward == 4 * (16 * 17 // 2) * HEADS * HEAD_DIM
    assert count.uncounted == ()


@pytest.mark.parametrize("name", ["gpt2", "janus", "qwen3"])
def test_text_equals_torch_counter(name):
    """Also with layers that are Conv1D, and beside a projector and a generator of images in a model with embeddings."""
    model = random_model(tiny_config(name))
    model.set_attn_implementation("eager")
    assert with_every_pair(opslot.count_flops(model, [16]), 16) == measured(model, 16)


def test_embeddings_of_patches_without_an_encoder_are_not_of_the_text():
    model = random_model(tiny_config("fuyu"))
    embedding = model.model.vision_embed_tokens
    count = opslot.count_flops(model, [16], patches=[5])
    text = opslot.count_flops(model, [16])
    assert count.forward - text.forward == 5 * 2 * embedding.in_features * embedding.out_features


def test_moe_model_equals_torch_counter():
    model = make("qwen3_moe", num_experts=8, **MOE)
    count = opslot.count_flops(model, [16])
    # torch does not count grouped GEMMs.
    assert with_every_pair(count, 16) - count.parts["experts"].total == measured(model, 16)


@pytest.mark.parametrize("targets", ["all-linear", ["down_proj"]])
def test_lora_equals_torch_counter(targets):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(make("qwen3"), config)
    model.add_adapter("unused", config)
    count = opslot.count_flops(model, [16])
    # Without a gradient in its input, the attention of the first layer has none.
    layers = LAYERS if targets == "all-linear" else LAYERS - 1
    attention = count.parts["attention"].forward
    assert count.parts["attention"].backward == 2 * attention * layers / LAYERS
    assert with_every_pair(count, 16) == measured(model, 16)
    assert count.parts["head"].backward == count.parts["head"].forward


def test_lora_of_experts_counts_pairs():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])
    model = peft.get_peft_model(make("qwen3_moe", num_experts=8, **MOE), config)
    adapters = 2 * 16 * LAYERS * 2 * 4 * (HIDDEN + 2 * 16)
    assert opslot.count_flops(model, [16]).parts["adapters"].forward == adapters


def test_frozen_model_has_no_backward():
    model = make("qwen3", "meta").requires_grad_(False)
    assert opslot.count_flops(model, [16]).backward == 0


@pytest.mark.parametrize(
    ("shape", "visible"),
    [
        (AttentionShape(), lambda q, k: k <= q),
        (AttentionShape(window=3), lambda q, k: q - 3 < k <= q),
        (AttentionShape(chunk=4), lambda q, k: k <= q and q // 4 == k // 4),
        (AttentionShape(causal=False), lambda q, k: True),
        (AttentionShape(causal=False, window=3), lambda q, k: abs(q - k) < 3),
    ],
)
def test_visible_pairs_equal_mask(shape, visible):
    lengths = [1, 3, 4, 10]
    assert visible_pairs(lengths, shape) == sum(visible(q, k) for n in lengths for q in range(n) for k in range(n))


@pytest.mark.parametrize("causal", [True, False])
def test_window_and_full_layers(causal):
    kinds = ["sliding_attention", "full_attention"] * 2
    model = make("gemma3_text", "meta", sliding_window=4, layer_types=kinds, use_bidirectional_attention=not causal)
    shapes = AttentionShape(causal), AttentionShape(causal, window=model.config.sliding_window)
    pairs = sum(2 * visible_pairs([16], shape) for shape in shapes)
    assert opslot.count_flops(model, [16]).parts["attention"].forward == 4 * pairs * HEADS * HEAD_DIM


def test_latent_attention_has_two_widths():
    model = make(
        "deepseek_v3",
        "meta",
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=8,
        **MOE,
    )
    attention = opslot.count_flops(model, [16]).parts["attention"]
    assert attention.forward == 2 * (16 * 17 // 2) * LAYERS * HEADS * (12 + 16)


def test_vision_tower_equals_torch_counter():
    config = tiny_config("qwen2_vl")
    config.vision_config.depth, config.vision_config.embed_dim, config.vision_config.num_heads = 2, 32, 4
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    tower = model.model.visual
    with FlopCounterMode(display=False) as counter:
        tower(torch.randn(64, tower.patch_embed.proj.weight[0].numel()), torch.tensor([[1, 8, 8]]))
    assert opslot.count_flops(model, [], patches=[64]).forward == counter.get_total_flops()
    assert not any(name.startswith("image") for name in opslot.count_flops(model, [16]).parts)


@pytest.mark.parametrize(("name", "frames"), [("qwen2_5_omni", 32), ("qwen3_omni_moe", 300)])
def test_audio_tower_with_windows_equals_torch_counter(name, frames):
    model = opslot.build_foundation_model(omni.CONFIGS[name](), ops_implementation="eager")
    tower = next(module for path, module in model.named_modules() if path.endswith("audio_tower"))
    tower.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        found = tower(torch.randn(8, frames), feature_lens=torch.tensor([frames]), aftercnn_lens=torch.tensor([frames]))
        found.last_hidden_state.sum().backward()
    count = opslot.count_flops(model, [], frames=[frames])
    assert count.total == pytest.approx(counter.get_total_flops())
    assert not any("audio" in part.path for part in count.uncounted)
    assert not any(part.startswith("audio") for part in opslot.count_flops(model, [16]).parts)


def test_adapters_in_an_audio_tower_equal_torch_counter():
    """Also on the layer that joins the channels of the convolutions, which is outside of the tower's layers."""
    peft = pytest.importorskip("peft")
    model = opslot.build_foundation_model(omni.CONFIGS["qwen3_omni_moe"](), ops_implementation="eager")
    targets = r".*audio_tower.*\.(q_proj|out_proj|fc1|conv_out|proj1)"
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=targets), model)
    tower = next(module for path, module in model.named_modules() if path.endswith("audio_tower"))
    tower.set_attn_implementation("eager")
    frames = torch.tensor([300])
    with FlopCounterMode(display=False) as counter:
        tower(torch.randn(8, 300), feature_lens=frames, aftercnn_lens=frames).last_hidden_state.sum().backward()
    count = opslot.count_flops(model, [], frames=[300])
    assert count.total == pytest.approx(counter.get_total_flops())
    assert "adapters" in "".join(count.parts)


@pytest.mark.parametrize("name", ["voxtral", "audioflamingo3"])
def test_audio_tower_and_projector_equal_torch_counter(name):
    config = tiny_config(name)
    model = getattr(transformers, multimodal_class(config))._from_config(config, attn_implementation="eager")
    frames = 2 * config.audio_config.max_source_positions
    holder = next(module for module in model.modules() if hasattr(module, "get_audio_features"))
    ones = torch.ones(1, frames, dtype=torch.int64)
    taken = inspect.signature(holder.get_audio_features).parameters
    features = torch.randn(1, config.audio_config.num_mel_bins, frames)
    with FlopCounterMode(display=False) as counter:
        holder.get_audio_features(features, **{mask: ones for mask in taken if "mask" in mask})
    assert opslot.count_flops(model, [], frames=[frames]).forward == counter.get_total_flops()


def test_convolutions_in_a_module_of_an_audio_tower_are_counted():
    """Voxtral Realtime's are in an embedder, which is read before them."""
    config = tiny_config("voxtral_realtime")
    with torch.device("meta"):
        model = getattr(transformers, multimodal_class(config))._from_config(config)
    embedder = model.model.audio_tower.embedder
    count = opslot.count_flops(model, [], frames=[400])
    # A row of the first one for each frame, and of the second one for every other.
    rows = {embedder.conv1: 399.8, embedder.conv2: 199.8}
    expected = sum(2 * rows[conv] * conv.weight.numel() for conv in rows)
    assert count.parts["audio convolution"].forward == pytest.approx(expected, rel=1e-3)
    assert not count.uncounted


CONFORMERS = {"gemma4": 128, "granite_speech": 160}


def conformer(name):
    """A tiny model with a Conformer, and the module that computes features of audio."""
    config = tiny_config(name)
    model = getattr(transformers, multimodal_class(config))._from_config(config, attn_implementation="eager")
    return model, [module for module in model.modules() if hasattr(module, "get_audio_features")][-1]


@pytest.mark.parametrize("name", CONFORMERS)
def test_conformer_equals_torch_counter(name):
    """Blocks with a context (Gemma) and without (Granite), with relative positions, whose number is constant."""
    model, holder = conformer(name)
    features = torch.randn(1, 1200, CONFORMERS[name])
    mask = {"input_features_mask": torch.ones(1, 1200, dtype=torch.bool)} if name == "gemma4" else {}
    with FlopCounterMode(display=False) as counter:
        holder.get_audio_features(features, **mask)
    count = opslot.count_flops(model, [], frames=[1200])
    assert count.forward == pytest.approx(counter.get_total_flops(), rel=1e-3)
    assert not any(
        part.path.startswith(("model.audio", "model.encoder", "model.projector")) for part in count.uncounted
    )
    model.requires_grad_(False)
    assert opslot.count_flops(model, [], frames=[1200]).backward == 0
    batch = {"input_features": features.expand(2, -1, -1)}
    assert audio_lengths(batch, FlopCounter(model).frames_dim) == [1200, 1200]


def test_attention_within_all_of_an_audio_is_quadratic():
    """Of a Parakeet encoder, whose relative positions are twice as many as its rows."""
    model, _ = conformer("nemotron_h_omni")
    parts = [opslot.count_flops(model, [], frames=[frames]).parts["audio attention"].forward for frames in (800, 1600)]
    assert 3.5 < parts[1] / parts[0] < 4.1


def test_adapters_in_a_conformer_are_counted():
    from peft import LoraConfig, get_peft_model

    model, _ = conformer("gemma4")
    model.requires_grad_(False)
    base = opslot.count_flops(model, [], frames=[800])
    count = opslot.count_flops(
        get_peft_model(model, LoraConfig(r=2, target_modules=r".*audio_tower.*ffw_layer_1.*linear")), [], frames=[800]
    )
    assert count.parts["audio adapters"].forward > 0
    assert count.parts["audio linear"].forward == base.parts["audio linear"].forward
    assert count.backward > 0


@pytest.mark.parametrize("name", ["vibevoice_asr", "omniasr", "muse_spark"])
def test_encoders_of_waveforms_equal_torch_counter(name):
    """Of VibeVoice there are two. Muse Spark requires a mask and has no dim of channels."""
    model, holder = conformer(name)
    waveform = torch.randn(1, 48_000) if name == "muse_spark" else torch.randn(1, 1, 48_000)
    mask = {"input_values_mask": torch.ones(1, 48_000, dtype=torch.bool)} if name == "muse_spark" else {}
    with FlopCounterMode(display=False) as counter:
        holder.get_audio_features(waveform, **mask)
    count = opslot.count_flops(model, [], frames=audio_lengths({"input_values": waveform}))
    # Without padding, the convolutions of OmniASR drop a row at the end of an audio.
    assert count.forward == pytest.approx(counter.get_total_flops(), rel=1e-3 if name == "omniasr" else 1e-9)
    assert not count.uncounted
    assert audio_lengths({"input_values": waveform.expand(2, *waveform.shape[1:])}) == [48_000] * 2


def test_encoders_without_gradients_have_no_backward():
    """VibeVoice runs its encoders with torch.no_grad(), and trains what follows them."""
    model, holder = conformer("vibevoice_asr")
    with FlopCounterMode(display=False) as counter:
        holder.get_audio_features(torch.randn(1, 1, 48_000)).pooler_output.sum().backward()
    assert opslot.count_flops(model, [], frames=[48_000]).total == pytest.approx(counter.get_total_flops())
    holder.multi_modal_projector.requires_grad_(False)
    assert opslot.count_flops(model, [], frames=[48_000]).backward == 0


@pytest.mark.quick("1203")
@pytest.mark.parametrize("frames", [800, 1203, 3000])
def test_encoder_of_a_module_that_places_its_features(frames):
    """Phi-4 multimodal has no method for the features of audio, and an encoder inside of its decoder."""
    config = tiny_config("phi4_multimodal")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    embed, rows = model.model.embed_tokens_extend.audio_embed, math.ceil(frames / 8)
    ids = torch.full((1, rows), config.audio_config.audio_token_id)
    features = torch.randn(1, frames, 80)
    with FlopCounterMode(display=False) as counter:
        out = embed(ids, torch.zeros(1, rows, config.hidden_size), features, audio_embed_sizes=[rows])
        forward = counter.get_total_flops()
        out.sum().backward()
    batch = {"audio_input_features": features, "audio_attention_mask": torch.ones(1, frames, dtype=torch.bool)}
    lengths = audio_lengths(batch, FlopCounter(model).frames_dim)
    assert lengths == [frames]
    count = opslot.count_flops(model, [], frames=lengths)
    assert count.forward == pytest.approx(forward, rel=0.01)
    # torch takes the weight gradients of depthwise convolutions for those of full ones.
    found = sum(part.total for name, part in count.parts.items() if name != "audio convolution")
    by_op = counter.get_flop_counts()["Global"]
    expected = sum(flops for op, flops in by_op.items() if "convolution" not in str(op))
    assert found == pytest.approx(expected, rel=0.01)
    # Its projectors are not computed for the tokens of the text.
    text = opslot.count_flops(model, [16])
    decoder = [m for layer in model.model.layers for m in layer.modules() if isinstance(m, nn.Linear)]
    assert text.parts["linear"].forward == 2 * 16 * sum(m.weight.numel() for m in decoder)
    assert not any("audio" in part.path for part in text.uncounted)


def test_encoder_that_does_not_run_without_values_is_reported(monkeypatch):
    model, holder = conformer("omniasr")
    monkeypatch.setattr(type(holder), "get_audio_features", lambda self, input_values: input_values.sum().item())
    count = opslot.count_flops(model, [16], frames=[100])
    assert ("model.audio_tower", "audio whose encoder does not run without values") in count.uncounted


def test_encoder_of_a_model_without_get_audio_features_is_reported(monkeypatch):
    monkeypatch.setattr("opslot.models.flop_measured._places", lambda module: False)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("phi4_multimodal"))
    count = opslot.count_flops(model, [16], frames=[100])
    reasons = {part.path: part.reason for part in count.uncounted}
    assert reasons["model.embed_tokens_extend.audio_embed.encoder"] == "audio of a model without get_audio_features"


def test_unknown_module_is_reported():
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.in_proj = nn.Linear(8, 8)
            self.A_log = nn.Parameter(torch.zeros(4))
            self.table = Table()

        def forward(self, x):
            return self.in_proj(x) * self.A_log.sum() @ self.table.mixing

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixing = nn.Parameter(torch.zeros(8, 8))

    count = opslot.count_flops(nn.Sequential(Mixer()), [4])
    assert [part.path for part in count.uncounted] == ["0", "0.table"]
    assert "not counted: 0.table" in str(count)
    assert count.parts["linear"].forward == 2 * 4 * 64


def test_state_space_model_is_reported():
    model = make("mamba", "meta", state_size=8)
    assert {part.path.rpartition(".")[2] for part in opslot.count_flops(model, [16]).uncounted} == {"mixer"}


@pytest.mark.parametrize("lengths", [[-1], [2.5], ["a"], [True]])
def test_wrong_lengths_raise(lengths):
    with pytest.raises(ConfigError, match="lengths"):
        opslot.count_flops(nn.Linear(2, 2), lengths)


def test_lengths_of_batches():
    tokens = torch.zeros(2, 6)
    assert document_lengths({"input_ids": tokens}) == [6, 6]
    assert document_lengths({"input_ids": tokens, "attention_mask": torch.ones(2, 6).long().triu()}) == [6, 5]
    assert document_lengths({"input_ids": tokens, "cu_seq_lens_q": torch.tensor([0, 4, 12])}) == [4, 8]
    assert image_lengths({"image_grid_thw": torch.tensor([[2, 4, 6]])}) == [24, 24]
    features = torch.zeros(2, 8, 40)
    assert audio_lengths({"input_features": features}) == [40, 40]
    mask = torch.arange(40) < torch.tensor([[30], [20]])
    assert audio_lengths({"input_features": features, "feature_attention_mask": mask}) == [30, 20]
    assert audio_lengths({}) == []
