"""Sizes of tiny configs: by name of a field, and what no rule gives, by model_type."""

from __future__ import annotations

from typing import Any

LAYERS = 2
HEADS = 4
ROPE, NOPE = 8, 8
PATCH, IMAGE = 4, 16
VOCABULARY = 64
# Ids below are those of text; those of images and of what surrounds them are above.
TEXT_VOCABULARY = 48


def _equal(size: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), size)


# Of a tiny config, for those of these fields that a config class has. None, 0 and False stay: they switch a
# part off.
SIZES: dict[str, Any] = {
    **_equal(
        32, "hidden_size encoder_hidden_size text_hidden_size audio_hidden_size out_hidden_size embed_dim output_dim"
    ),
    **_equal(
        32, "projection_dim projection_hidden_size projector_hidden_size projector_input_dim projector_output_dim"
    ),
    **_equal(32, "vision_output_dim base_channels hidden_size_global entity_emb_size"),
    **_equal(48, "intermediate_size intermediate_size_mlp ffn_hidden_size ffn_dim encoder_ffn_dim decoder_ffn_dim"),
    **_equal(LAYERS, "num_hidden_layers num_layers encoder_layers decoder_layers depth"),
    **_equal(HEADS, "num_attention_heads num_heads encoder_attention_heads decoder_attention_heads"),
    "num_key_value_heads": 2,
    **_equal(8, "head_dim global_head_dim"),
    "rotary_dim": 4,
    # Tokens and positions
    **_equal(VOCABULARY, "vocab_size vocab_size_per_layer_input entity_vocab_size encoder_hash_byte_group_vocab"),
    **_equal(VOCABULARY, "shape_vocab_size pronunciation_vocab_size"),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
    **_equal(8, "sliding_window attention_chunk_size"),
    # Positions from which on queries are scaled.
    **_equal(4, "floor_scale log_scaling_n_floor"),
    # Latent attention
    **_equal(8, "q_lora_rank kv_lora_rank o_lora_rank v_head_dim"),
    "o_groups": 2,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    # Sparse attention
    # Few heads would give many keys a score of 0, and which of those are selected is arbitrary.
    "index_n_heads": 16,
    **_equal(8, "index_head_dim index_topk"),
    # Linear attention and state spaces
    **_equal(8, "linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_state ssm_state_size"),
    **_equal(8, "mamba_chunk_size chunk_size"),
    **_equal(HEADS, "linear_num_value_heads linear_num_heads mamba_n_heads n_mamba_heads mamba_num_heads"),
    **_equal(16, "mamba_d_head mamba_head_dim block_multiple_of"),
    **_equal(2, "linear_num_key_heads n_groups"),
    "mamba_d_ssm": 64,
    # Experts
    **_equal(16, "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size"),
    **_equal(16, "shared_intermediate_size expert_ffn_hidden_size"),
    **_equal(4, "num_experts num_local_experts n_routed_experts"),
    **_equal(2, "num_experts_per_tok moe_topk zero_expert_num n_group"),
    **_equal(1, "topk_group first_k_dense_replace num_dense_layers"),
    # Inputs per layer
    **_equal(8, "hidden_size_per_layer_input laurel_rank"),
    # Vision and audio encoders
    "patch_size": PATCH,
    **_equal(IMAGE, "image_size crop_size resolution"),
    **_equal(
        16, "num_position_embeddings position_embedding_size window_size context_size vision_soft_tokens_per_image"
    ),
    **_equal(4, "pos_emb_height pos_emb_width mm_tokens_per_image num_query_tokens"),
    "max_source_positions": 24,
    "audio_soft_tokens_per_image": 8,
    "insert_layer_id": 1,
    "pooling_kernel_size": 2,
}
# Of a config for a GPU, whose kernels are for larger heads: eight times as wide, with head sizes of 64.
GPU_SIZES: dict[str, Any] = {
    **{
        name: 8 * size if size in (SIZES["hidden_size"], SIZES["intermediate_size"]) else size
        for name, size in SIZES.items()
    },
    **_equal(64, "head_dim global_head_dim v_head_dim qk_rope_head_dim qk_nope_head_dim"),
    **_equal(64, "q_lora_rank kv_lora_rank o_lora_rank linear_key_head_dim linear_value_head_dim linear_head_dim"),
    **_equal(64, "mamba_d_head mamba_head_dim mamba_d_state ssm_state_size mamba_chunk_size chunk_size"),
    **_equal(128, "index_head_dim moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"),
    **_equal(128, "moe_shared_expert_intermediate_size expert_ffn_hidden_size"),
    **_equal(8, "mamba_n_heads n_mamba_heads mamba_num_heads"),
    **_equal(32, "rotary_dim sliding_window attention_chunk_size"),
    **_equal(512, "mamba_d_ssm max_position_embeddings"),
    "index_topk": 16,
}
# Fields that config classes leave at None although their models need a value.
NEEDED = ("head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts")

_STARTS = {"vision_start_token_id": 60, "vision_end_token_id": 61, "audio_start_token_id": 62, "audio_end_token_id": 63}
_ROTARY: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {**_ROTARY, "mrope_section": [1, 1, 2]}
_INKLING = {
    **_equal(8, "rel_extent swa_head_dim"),
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": 2,
    "unpadded_vocab_size": VOCABULARY,
}

# What the rules do not give, by model_type.
OVERRIDES: dict[str, dict[str, Any]] = {
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "bamba": {"attn_layer_indices": [1]},
    # Values that the model reads and its config classes do not set.
    "dbrx": {
        "d_model": 32,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_top_k": 2},
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {kind: dict(_ROTARY) for kind in ("sliding_attention", "full_attention")},
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 3},
    "mobilebert": {"embedding_size": 16, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    # Codes of images are tokens, whose names end in their numbers, in letters or digits.
    "chameleon": {"vocabulary_map": {"<image>": 60, "IMGIMGAZ": 58, "IMGIMGBZ": 59}},
    "chameleon_vqgan": {"num_embeddings": 2},
    "emu3_vqgan": {"codebook_size": 2, "hidden_size": 128},
    **{name: {"mlp_layer_types": ["dense", "sparse"]} for name in ("deepseek_ocr2_text", "unlimited_ocr_text")},
    # The last is the width of the encoder behind it.
    **{f"{name}_sam_vision_model": {"downsample_channels": [16, 32]} for name in ("deepseek_ocr2", "unlimited_ocr")},
    # Layers of the encoder whose features are added before layers of the language model.
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-2, 0]],
        "spatial_target_layers": [1, 1, 1, 1],
        "projector_dropout": 0.0,
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 48,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "patch_size": PATCH,
            "image_size": IMAGE,
        },
        "vision_feature_select_strategy": "full",
    },
    "dots1": {"n_shared_experts": 1},
    # Layers with a sliding window have sizes of their own.
    "dots3_note_text": {
        "shared_experts_intermediate_size": 16,
        "per_layer_config": {
            2: {
                **_equal(HEADS, "num_attention_heads num_key_value_heads"),
                **_equal(8, "q_lora_rank kv_lora_rank v_head_dim"),
                "head_dim": NOPE + ROPE,
                "qk_nope_head_dim": NOPE,
                "qk_rope_head_dim": ROPE,
            }
        },
    },
    # A quarter of it rotates, by two axes of positions.
    "neomme": {"head_dim": 16},
    # Codes of images and audio are tokens.
    "apertus1p5": {"image_token_offset": 58, "audio_token_offset": 60},
    **{name: {"codebook_size": 2} for name in ("apertus1p5_vision_tokenizer", "wavtokenizer_encoder")},
    # Runs its second layer twice.
    "dory": {
        "num_hidden_layers": 3,
        **_equal(1, "n_input_layers n_recurrent_layers n_output_layers"),
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "glm5_next_text": {"index_topk": 4, "index_kpool": 2},
    # Runs its second and third layers twice.
    "inkling2_loop_text": {
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
        **_equal(1, "n_layers_per_attn_res_block loop_layer_index_start"),
        "loop_layer_index_end": 3,
        "loop_num_passes": 2,
        "loop_gate_rank": 8,
        **_INKLING,
    },
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid"], **_INKLING},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        # It must equal the number of key/value heads.
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "aria": {"projector_patch_to_query_dict": {"16": 4}},
    "glm4v_moe_text": {"rope_parameters": {**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [0, 1, 1]}},
    # A multiple of downsample_rate.
    "granite_speech": {"window_size": 15},
    "granite_speech_plus": {"window_size": 15},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "step3p5": {"sliding_window": 8, "share_expert_dim": 16, "swiglu_limits": [0.5, 0.5]},
    # Heads times their size is the width of the state.
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "emu3": {
        "image_token_id": 60,
        "vocabulary_map": {
            "<image>": 60,
            "<|extra_200|>": 61,
            "<|visual token 000000|>": 62,
            "<|visual token 000001|>": 63,
        },
    },
    # Optional in its config class.
    "nemotron_h_omni": {
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "intermediate_size": 48,
            "num_mel_bins": 16,
            "subsampling_conv_channels": 8,
            "projection_hidden_size": 32,
            "projection_bias": False,
        },
        "vision_hidden_size": 32,
    },
    "muse_spark_audio": {"hidden_sizes": [16, 16, 32, 32]},
    "muse_spark_text": {"moe_hidden_size": 32},
    # With one key, gradients of queries are rounding errors.
    "pp_formulanet_vision": {"image_size": 2 * IMAGE},
    # Its features have noise.
    "vibevoice_acoustic_tokenizer_encoder": {
        "num_filters": 4,
        "downsampling_ratios": [2, 2],
        "depths": [1, 1, 1],
        "vae_std": 0.0,
    },
    # Ids of images and audio have embeddings of their own, behind those of text.
    "gemma3n": {"image_token_id": 49, "audio_token_id": 57},
    # The number of its channels is in timm's code.
    "gemma3n_vision": {
        "vocab_size": 8,
        "vocab_offset": 48,
        "hidden_size": 2048,
        "model_args": {"channel_multiplier": 0.05, "msfa_output_resolution": 4},
    },
    "gemma3n_audio": {"vocab_size": 8, "vocab_offset": 56},
    # Encoders of timm.
    "perception_lm": {
        "vision_config": {
            "model_type": "timm_wrapper",
            "architecture": "vit_pe_core_large_patch14_336",
            "model_args": {
                "embed_dim": 32,
                "depth": LAYERS,
                "num_heads": 2,
                "patch_size": PATCH,
                "img_size": [IMAGE, IMAGE],
                "ref_feat_shape": [IMAGE // PATCH, IMAGE // PATCH],
                "global_pool": "",
            },
        }
    },
    "fast_vlm": {
        "vision_config": {
            "model_type": "timm_wrapper",
            "architecture": "fastvit_mci3",
            "hidden_size": 64,
            "model_args": {"inference_mode": True, "layers": [1] * 5, "embed_dims": [8, 16, 32, 32, 32]},
        }
    },
    # Four patches are one feature.
    "llama4_vision_model": {"intermediate_size": 128},
    # The last layer and an intermediate one, side by side.
    "mllama_vision_model": {"num_global_layers": 1, "intermediate_layers_indices": [0], "vision_output_dim": 64},
    # Read by `get_rope_index`.
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), _STARTS),
    "qwen4_exp_text": {
        # Few heads would give many pools a score of 0.
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "eos_token_id": 2,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 40,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
    # Later attention shares the weights of the first.
    "zamba": {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 4, "num_attention_heads": HEADS},
}

# Transformers before 5.15 adds the states of these models' chunks along the wrong dim: its scan is right in one chunk.
ONE_CHUNK_BEFORE_5_15 = {"nemotron_h": {"chunk_size": 64}, "zamba2": {"chunk_size": 64}}
