"""Tiny omni models: the published top-level configs with small sizes, and inputs of every modality."""

import math

import torch

TOKENS = {"image": 40, "video": 41, "audio": 42, "vision_start": 43, "vision_end": 44, "audio_start": 45}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": _ROPE,
    "rope_scaling": _ROPE,
}
_AUDIO = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "output_dim": 32,
    "num_mel_bins": 8,
    "n_window": 4,
    "max_source_positions": 64,
}
_VISION = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_IDS = {f"{name}_token_id": number for name, number in TOKENS.items()}


def qwen2_5_omni():
    from transformers import Qwen2_5OmniConfig

    vision = {**_VISION, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "window_size": 16}
    vision |= {"fullatt_block_indexes": [1]}
    thinker = {"text_config": _TEXT, "audio_config": _AUDIO, "vision_config": vision}
    ids = _IDS | {f"{name}_token_index": TOKENS[name] for name in ("image", "video", "audio")}
    talker = {**_TEXT, "embedding_size": 32, "head_dim": 8}
    dit = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8, "emb_dim": 16}
    dit |= {"enc_channels": [8, 8, 8, 8, 24], "enc_attention_channels": 4, "enc_se_channels": 4, "enc_dim": 8}
    vocoder = {"mel_dim": 8, "upsample_initial_channel": 8, "upsample_rates": [2], "upsample_kernel_sizes": [4]}
    vocoder |= {"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3, 5]]}
    speech = {"dit_config": dit | {"mel_dim": 8, "num_embeds": 9}, "bigvgan_config": vocoder}
    return Qwen2_5OmniConfig(thinker_config=thinker | ids, talker_config=talker, token2wav_config=speech)


def qwen3_omni_moe():
    from transformers import Qwen3OmniMoeConfig

    text = {**_TEXT, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    vision = {**_VISION, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    # Transformers' code has the number of tokens of a chunk of 100 frames as a constant.
    audio = {**_AUDIO, "downsample_hidden_size": 8, "n_window": 50, "n_window_infer": 100, "conv_chunksize": 4}
    thinker = {"text_config": text, "audio_config": audio, "vision_config": vision}
    code = {**_TEXT, "num_code_groups": 4, "head_dim": 8}
    talker = {
        "text_config": text | {"shared_expert_intermediate_size": 16},
        "code_predictor_config": code,
        "thinker_hidden_size": 32,
        "num_code_groups": 4,
    }
    talker |= {"speaker_id": {"ethan": 1}, "accept_hidden_layer": 1, "spatial_merge_size": 2}
    wav = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    wav |= {"intermediate_size": 24, "decoder_dim": 16, "upsample_rates": [2], "upsampling_ratios": [2]}
    wav |= {"codebook_size": 16, "num_quantizers": 2}
    return Qwen3OmniMoeConfig(thinker_config=thinker | _IDS, talker_config=talker, code2wav_config=wav)


CONFIGS = {"qwen2_5_omni": qwen2_5_omni, "qwen3_omni_moe": qwen3_omni_moe}


def inputs(name, kinds):
    """A sequence with one input of each of `kinds`, as the processor of the model would return it."""
    generator = torch.Generator().manual_seed(0)
    ids, found = [1, 2, 3], {}
    for kind in kinds:
        if kind == "audio":
            frames = 130
            count = audio_tokens(name, frames)
            features = torch.zeros(1, 8, 160)
            features[..., :frames] = torch.randn(1, 8, frames, generator=generator)
            mask = (torch.arange(160) < frames).long()[None]
            for key, value in (("input_features", features), ("feature_attention_mask", mask)):
                found[key] = torch.cat([found[key], value]) if key in found else value
            ids += [TOKENS["audio_start"], *[TOKENS["audio"]] * count, 46, 7]
            continue
        grid = torch.tensor([[1, 4, 4]] if kind == "image" else [[2, 4, 4]])
        pixels = torch.randn(int(grid.prod()), 3 * 2 * 4 * 4, generator=generator)
        key = "pixel_values" if kind == "image" else "pixel_values_videos"
        found |= {key: pixels, f"{kind}_grid_thw": grid}
        if kind == "video":
            found["video_second_per_grid"] = torch.tensor([1.0])
        ids += [TOKENS["vision_start"], *[TOKENS[kind]] * (int(grid.prod()) // 4), TOKENS["vision_end"], 8]
    ids = torch.tensor([[*ids, 9, 10, 11, 12]])
    labels = torch.where((ids >= 40) & (ids <= 46), -100, ids)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, **found}


def audio_tokens(name, frames):
    if name == "qwen2_5_omni":
        return ((frames - 1) // 2 + 1 - 2) // 2 + 1
    whole, rest = divmod(frames, 100)
    return 13 * whole + math.ceil(rest / 8)
