"""Tiny configs of any architecture: small sizes, and one layer of each kind that the default config has."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opslot._base.errors import ConfigError
from opslot.verify.random_model import has_language_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LAYERS = 2
_HEADS = 4
_ROPE, _NOPE = 8, 8
_PATCH, _IMAGE = 4, 16
_VOCABULARY = 64
_KINDS = ("image", "video", "audio")
# Ids below are those of text; those of images and of what surrounds them are above.
_TEXT_VOCABULARY = 48

# Sizes of a tiny config, for those of these fields that a config class has. None, 0 and False stay: they switch a
# part off.
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": _LAYERS,
    "num_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rotary_dim": 4,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    # Positions from which on queries are scaled.
    "floor_scale": 4,
    "log_scaling_n_floor": 4,
    # Latent attention
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "o_lora_rank": 8,
    "o_groups": 2,
    "qk_rope_head_dim": _ROPE,
    "qk_nope_head_dim": _NOPE,
    "v_head_dim": 8,
    # Sparse attention
    # Few heads would give many keys a score of 0, and which of those are selected is arbitrary.
    "index_n_heads": 16,
    "index_head_dim": 8,
    "index_topk": 8,
    # Linear attention and state spaces
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": _HEADS,
    "linear_head_dim": 8,
    "linear_num_heads": _HEADS,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_n_heads": 4,
    "n_mamba_heads": 4,
    "mamba_head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_chunk_size": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "block_multiple_of": 16,
    # Experts
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "intermediate_size_mlp": 48,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "zero_expert_num": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    # Inputs per layer
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "laurel_rank": 8,
    # Encoders and decoders with fields of their own
    "encoder_layers": _LAYERS,
    "decoder_layers": _LAYERS,
    "encoder_attention_heads": _HEADS,
    "decoder_attention_heads": _HEADS,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "ffn_dim": 48,
    # Vision and audio encoders
    "depth": _LAYERS,
    "encoder_hidden_size": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "vision_output_dim": 32,
    "text_hidden_size": 32,
    "audio_hidden_size": 32,
    "output_dim": 32,
    "max_source_positions": 24,
    "audio_soft_tokens_per_image": 8,
    "vision_soft_tokens_per_image": 16,
    "context_size": 16,
    "insert_layer_id": 1,
    "embed_dim": 32,
    "num_heads": _HEADS,
    "out_hidden_size": 32,
    "projection_dim": 32,
    "projection_hidden_size": 32,
    "projector_hidden_size": 32,
    "patch_size": _PATCH,
    "image_size": _IMAGE,
    "crop_size": _IMAGE,
    "resolution": _IMAGE,
    "base_channels": 32,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "pooling_kernel_size": 2,
    "mm_tokens_per_image": 4,
    "window_size": 16,
}
# Fields that config classes leave at None although their models need a value.
_NEEDED = ("head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts")

# Names of the hidden size.
_WIDTHS = ("hidden_size", "d_model", "embed_dim", "n_embd", "dim")
_WIDTH_NAMES = ("_dim", "_size", "_width", "_channel", "_channels")
_SIZES_BY_WIDTH = ("hidden_size", "intermediate_size", "_in_dim", "_out_dim", "input_dim", "output_dim", "_width")
_SMALLEST_WIDTH = 64
_MOST_RATIO = 16

_STARTS = {"vision_start_token_id": 60, "vision_end_token_id": 61, "audio_start_token_id": 62, "audio_end_token_id": 63}
_ROTARY: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {**_ROTARY, "mrope_section": [1, 1, 2]}

# What the rules do not give, by model_type.
_OVERRIDES: dict[str, dict[str, Any]] = {
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
    # Codes of images are tokens, whose names end in their numbers, in letters or digits.
    "chameleon": {"vocabulary_map": {"<image>": 60, "IMGIMGAZ": 58, "IMGIMGBZ": 59}},
    "chameleon_vqgan": {"num_embeddings": 2},
    "emu3_vqgan": {"codebook_size": 2, "hidden_size": 128},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "dots1": {"n_shared_experts": 1},
    "glm5_next_text": {"index_topk": 16},
    "aria": {"projector_patch_to_query_dict": {"16": 4}},
    "glm4v_moe_text": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [0, 1, 1]}},
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
                "depth": _LAYERS,
                "num_heads": 2,
                "patch_size": _PATCH,
                "img_size": [_IMAGE, _IMAGE],
                "ref_feat_shape": [_IMAGE // _PATCH, _IMAGE // _PATCH],
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
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
    # Later attention shares the weights of the first.
    "zamba": {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 4, "num_attention_heads": _HEADS},
}


def tiny_config(arch: str) -> PreTrainedConfig:
    """A config of a model_type, or of a folder under `transformers/models`, that builds in milliseconds.

    Raises:
        ConfigError: Transformers has no such architecture.
    """
    return shrink(_default_config(arch))


def tiny_configs(arch: str) -> Iterator[PreTrainedConfig]:
    """`tiny_config`, and another whose sizes have the ratios of the default config; those that the class accepts.

    Raises:
        ConfigError: Transformers has no such architecture.
        Exception: what the config class raises, if it accepts none.
    """
    default = _default_config(arch)
    error: Exception | None = None
    for ratios in (False, True):
        try:
            found = shrink(default, ratios=ratios)
        # Validation of any config class.
        except Exception as raised:
            if ratios and error is not None:
                raise error from raised
            error = raised
        else:
            yield found


def _default_config(arch: str) -> PreTrainedConfig:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return _with_language_model(CONFIG_MAPPING[model_type_of(arch)]())


def _with_language_model(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config, or for an encoder the default config of a model with a language model that has it."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    if has_language_model(config):
        return config
    kinds = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
    names = [name for kind in kinds for name in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", ())]
    for name in dict.fromkeys(name for name in names if name in CONFIG_MAPPING_NAMES):
        with contextlib.suppress(Exception):
            whole = CONFIG_MAPPING[name]()
            if any(type(getattr(whole, part, None)) is type(config) for part in ("vision_config", "audio_config")):
                return whole
    return config


def model_type_of(arch: str) -> str:
    """The model_type `arch`, or that of the language model in a folder under `transformers/models`.

    Raises:
        ConfigError: Transformers has no such architecture.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if arch in CONFIG_MAPPING_NAMES:
        return arch
    inside = [name for name in CONFIG_MAPPING_NAMES if model_type_to_module_name(name) == arch]
    if not inside:
        near = difflib.get_close_matches(arch, CONFIG_MAPPING_NAMES, 3)
        raise ConfigError(
            f"Transformers has no architecture {arch!r}",
            hint=f"did you mean {' or '.join(map(repr, near))}?" if near else "give a model_type, e.g. 'qwen3'",
        )
    return next((name for name in inside if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), inside[0])


def shrink(default: PreTrainedConfig, *, ratios: bool = False) -> PreTrainedConfig:
    """A tiny config of the same class as `default`; nested configs are made tiny too.

    Args:
        ratios: keep the ratios of sizes to the hidden size, as far as they are whole, instead of usual sizes.
    """
    return _shrink(default, frozenset(_widths(default)), ratios)


def _shrink(default: PreTrainedConfig, widths: frozenset[int], ratios: bool) -> PreTrainedConfig:
    given = default.to_dict()
    given |= {name: given.get(stored) for name, stored in default.attribute_map.items()}
    values = _set_by_the_model(default, given)
    values |= {name: size for name, size in _SIZES.items() if given.get(name) or (name in given and name in _NEEDED)}
    values |= _sizes_by_width(given, widths, ratios)
    if given.get("num_key_value_heads") == given.get("num_attention_heads"):
        values["num_key_value_heads"] = _HEADS
    if given.get("n_group") == 1:
        values["n_group"] = 1
    if given.get("head_dim") and given["head_dim"] == _sum(given, "qk_nope_head_dim", "qk_rope_head_dim"):
        values["head_dim"] = _NOPE + _ROPE
    for name, size in values.items():
        if isinstance(given.get(name), list | tuple) and isinstance(size, int):
            values[name] = [size] * len(given[name])
    values |= _layers(given, "num_hidden_layers" if "num_hidden_layers" in given else "depth")
    values |= {name: 0.0 for name, value in given.items() if "dropout" in name and isinstance(value, float)}
    values |= _rotary_sections(given, values)
    values |= {name: _inner_layers(given[name]) for name in given if name.startswith("vision_feature_layer")}
    overrides = _OVERRIDES.get(default.model_type, {})
    if given.get("is_encoder_decoder"):
        # Not a field of each config class, although the loss needs it.
        overrides = {"decoder_start_token_id": _SIZES["bos_token_id"], **overrides}
    values |= overrides
    nested = {name: config for name in default.sub_configs if (config := _sub_config(default, name)) is not None}
    values |= {name: _shrink(config, widths, ratios).to_dict() for name, config in nested.items() if name not in values}
    values |= _token_ids(given) if len(nested) > 1 else _special_token_ids(given)
    if given.get("image_grid_pinpoints"):
        values["image_grid_pinpoints"] = [[_IMAGE, 2 * _IMAGE], [2 * _IMAGE, _IMAGE], [2 * _IMAGE, 2 * _IMAGE]]
    values |= overrides
    stored = {name: value for name, value in values.items() if default.attribute_map.get(name) not in values}
    stored = {name: value for name, value in stored.items() if name in given or name in overrides}
    try:
        return type(default)(**stored)
    # Validation of any config class, such as of rotary parameters by kind of layer.
    except Exception:
        if stored.pop("rope_parameters", None) in (None, given.get("rope_parameters")):
            raise
        return type(default)(**stored)


def _widths(config: PreTrainedConfig) -> Iterator[int]:
    """Hidden sizes of a config and those in it."""
    own = (getattr(config, name, None) for name in _WIDTHS)
    yield from (width for width in own if type(width) is int and width)
    for name in config.sub_configs:
        nested = _sub_config(config, name)
        if nested is not None:
            yield from _widths(nested)


def _sizes_by_width(given: dict[str, Any], widths: frozenset[int], ratios: bool) -> dict[str, int]:
    """Sizes that follow from a hidden size of the model: those that no rule knows, and with `ratios` all."""
    own = [given[name] for name in _WIDTHS if type(given.get(name)) is int and given[name]]
    found = {}
    for name, value in given.items():
        if type(value) is not int or value < _SMALLEST_WIDTH or not name.endswith(_WIDTH_NAMES):
            continue
        if name not in _SIZES and value in widths:
            found[name] = _SIZES["hidden_size"]
        elif ratios and name.endswith(_SIZES_BY_WIDTH):
            scaled = next((size for width in (*own, *sorted(widths)) if (size := _scaled(value, width))), None)
            found |= {} if scaled is None else {name: scaled}
    return found


def _scaled(value: int, width: int) -> int | None:
    """The tiny size whose ratio to the tiny hidden size is that of `value` to `width`; None if that is not whole."""
    size, rest = divmod(_SIZES["hidden_size"] * value, width)
    small, large = min(value, width), max(value, width)
    return size if not rest and not large % small and large <= _MOST_RATIO * small else None


def _set_by_the_model(default: PreTrainedConfig, given: dict[str, Any]) -> dict[str, Any]:
    """Fields to which the config that holds this one gives other values than its class."""
    usual = type(default)().to_dict()
    kept = (int, float, str, bool)
    return {name: v for name, v in given.items() if isinstance(v, kept) and name in usual and usual[name] != v}


def _sum(given: dict[str, Any], *names: str) -> int:
    return sum(given.get(name) or 0 for name in names)


def _sub_config(default: PreTrainedConfig, name: str) -> PreTrainedConfig | None:
    """A nested config; its class's default for an encoder that the default config does not have."""
    found = getattr(default, name, None)
    cls = default.sub_configs[name]
    if found is None and name in ("vision_config", "audio_config") and not cls.__name__.startswith("Auto"):
        found = cls()
    return found


def _token_ids(given: dict[str, Any]) -> dict[str, int]:
    """Different ids above those of text, for images and what surrounds them."""
    unset = [name for kind in _KINDS for name in (f"{kind}_token_id", f"{kind}_token_index") if name in given]
    named = [name for name in given if re.search(r"_token_(id|index)$", name) and isinstance(given[name], int)]
    names = {*named, *unset}
    media = sorted(name for name in names if name not in _SIZES)
    return {name: _TEXT_VOCABULARY + i % (_VOCABULARY - _TEXT_VOCABULARY) for i, name in enumerate(media)}


def _special_token_ids(given: dict[str, Any]) -> dict[str, int]:
    """Different ids of the placeholders that the config of an encoder has itself, and of what is outside of a tiny
    vocabulary."""
    names = [f"{kind}_token_id" for kind in _KINDS]
    others = [name for name in given if name.endswith("_token_id") and name not in (*_SIZES, *names)]
    others = [name for name in others if type(given[name]) is int and given[name] >= _VOCABULARY]
    # Encoders of one model have configs of their own, and need different ids.
    ids = {name: _VOCABULARY - 1 - i for i, name in enumerate([*names, *others])}
    return {name: id for name, id in ids.items() if name in others or isinstance(given.get(name), int)}


def _rotary_sections(given: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters whose sections, one for each axis of positions, fit the tiny head size."""
    head_dim = values.get("head_dim") or _SIZES["hidden_size"] // _HEADS
    found: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        rope: Any = given.get(name)
        per_layer_kind = isinstance(rope, dict) and any(isinstance(value, dict) for value in rope.values())
        reads = name == "rope_parameters" and "num_key_value_heads" in given and _reads_sections(given["model_type"])
        if reads and not per_layer_kind:
            rope = {**_MROPE, **(rope or {})}
        for key, sections in rope.items() if isinstance(rope, dict) else ():
            if key.endswith("_section") and isinstance(sections, list | tuple):
                factor = rope.get("partial_rotary_factor") or given.get("partial_rotary_factor") or 1
                half, axes = int(head_dim * factor) // 2, len(sections)
                found[name] = {**rope, key: [half // axes + (axis >= axes - half % axes) for axis in range(axes)]}
    return found


def _inner_layers(chosen: Any) -> Any:
    """Numbers of layers, or one of them, that a tiny encoder has; negative ones count from its end."""
    if isinstance(chosen, list | tuple):
        return [_inner_layers(layer) for layer in chosen]
    return max(-_LAYERS, min(chosen, _LAYERS - 1)) if isinstance(chosen, int) else chosen


def _reads_sections(model_type: str) -> bool:
    """Whether the code of a model_type reads sections of its rotary embedding, which default configs may lack."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = model_type_to_module_name(model_type)
    spec = importlib.util.find_spec(f"transformers.models.{folder}")
    places = spec.submodule_search_locations if spec is not None else None
    files = (Path(place, f"modeling_{folder}.py") for place in places or ())
    return any('"mrope_section"' in file.read_text() for file in files if file.is_file())


def _layers(given: dict[str, Any], counted: str) -> dict[str, Any]:
    """Fields with a value per layer or with numbers of layers, for one layer of each kind, in their order.

    Args:
        counted: the field with the number of layers.
    """
    count = given.get(counted)
    lists = {name: list(value) for name, value in given.items() if isinstance(value, list | tuple)}
    numbers = {name: value for name, value in lists.items() if _are_layers(name, value, count)}
    per_layer = {name: value for name, value in lists.items() if len(value) == count and name not in numbers}
    if not isinstance(count, int) or not (per_layer or numbers):
        return {}
    kinds: dict[str, int] = {}
    for layer in range(count):
        kind = [value[layer] for value in per_layer.values()], [layer in value for value in numbers.values()]
        kinds.setdefault(str(kind), layer)
    chosen = list(kinds.values())
    shared = {}
    if given.get("num_kv_shared_layers"):
        # The last layers take keys and values from earlier ones of the same kind.
        shared = {"num_kv_shared_layers": len(chosen)}
        chosen *= 2
    chosen = chosen * _LAYERS if len(chosen) == 1 else chosen
    small = {name: [_small(name, value[layer]) for layer in chosen] for name, value in per_layer.items()}
    small |= {name: [i for i, layer in enumerate(chosen) if layer in value] for name, value in numbers.items()}
    return {**small, **shared, counted: len(chosen)}


def _are_layers(name: str, value: list[Any], count: Any) -> bool:
    """Whether a list has numbers of layers, e.g. those with experts."""
    if not isinstance(count, int):
        return False
    named = "layer" in name or name.endswith(("_idxs", "_indices", "_indexes"))
    integers = all(type(n) is int for n in value)
    return named and bool(value) and integers and value == sorted({*value}) and value[-1] < count


def _small(name: str, value: Any) -> Any:
    """A layer's value of field `name`, which may be a size."""
    return _SIZES[name] if name in _SIZES and isinstance(value, int) and value else value
