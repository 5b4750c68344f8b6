"""Tiny configs of any architecture: small sizes, and one layer of each kind that the default config has."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from opslot._base.errors import ConfigError
from opslot.models._build import auto_class_name
from opslot.patchgen.names import modeling_module
from opslot.patchgen.source import installed_release
from opslot.verify.tiny_sizes import (
    HEADS,
    IMAGE,
    LAYERS,
    MROPE,
    NEEDED,
    ONE_CHUNK_BEFORE_5_15,
    OVERRIDES,
    SIZES,
    TEXT_VOCABULARY,
    VOCABULARY,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Sizes = Mapping[str, Any]

_KINDS = ("image", "video", "audio")
# Names of the hidden size.
_WIDTHS = ("hidden_size", "d_model", "embed_dim", "n_embd", "dim")
_WIDTH_NAMES = ("_dim", "_size", "_width", "_channel", "_channels")
_SIZES_BY_WIDTH = ("hidden_size", "intermediate_size", "_in_dim", "_out_dim", "input_dim", "output_dim", "_width")
_SMALLEST_WIDTH = 64
_MOST_RATIO = 16


def tiny_config(arch: str) -> PreTrainedConfig:
    """A config of a model_type, or of a folder under `transformers/models`, that builds in milliseconds.

    Raises:
        ConfigError: Transformers has no such architecture.
    """
    return shrink(_default_config(arch))


def tiny_configs(arch: str, sizes: Sizes = SIZES) -> Iterator[PreTrainedConfig]:
    """`tiny_config`, and another whose sizes have the ratios of the default config; those that the class accepts.

    Args:
        sizes: by name of a field; first those, where they are others, then `SIZES`.

    Raises:
        ConfigError: Transformers has no such architecture.
        Exception: what the config class raises, if it accepts none.
    """
    default = _default_config(arch)
    error: Exception | None = None
    built = False
    for given, ratios in itertools.product((SIZES,) if sizes is SIZES else (sizes, SIZES), (False, True)):
        try:
            found = shrink(default, ratios=ratios, sizes=given)
        # Validation of any config class.
        except Exception as raised:
            error = error or raised
        else:
            built = True
            yield found
    if not built and error is not None:
        raise error


def _default_config(arch: str) -> PreTrainedConfig:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return _with_language_model(CONFIG_MAPPING[model_type_of(arch)]())


def _with_language_model(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config, or for an encoder the default config of a model with a language model that has it."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    with contextlib.suppress(ConfigError):
        auto_class_name(config, masked=True)
        return config
    for name in filter(CONFIG_MAPPING_NAMES.__contains__, modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES):
        with contextlib.suppress(Exception), _errors_only():
            whole = CONFIG_MAPPING[name]()
            if any(type(getattr(whole, part, None)) is type(config) for part in ("vision_config", "audio_config")):
                return whole
    return config


@contextlib.contextmanager
def _errors_only() -> Iterator[None]:
    """Without Transformers' warnings, such as that of Qwen2.5-Omni's default config about its own token ids."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


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
    inside = inside or _model_types_of_file(arch)
    if not inside:
        near = difflib.get_close_matches(arch, CONFIG_MAPPING_NAMES, 3)
        raise ConfigError(
            f"Transformers has no architecture {arch!r}",
            hint=f"did you mean {' or '.join(map(repr, near))}?" if near else "give a model_type, e.g. 'qwen3'",
        )
    return next((name for name in inside if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), inside[0])


def _model_types_of_file(arch: str) -> list[str]:
    """The model_types of the models in one of several files of a folder (data2vec_text, blip_text); empty for other
    names."""
    module = modeling_module(arch)
    if not installed_release().path(module).is_file():
        return []
    classes = vars(importlib.import_module(module)).values()
    configs = (getattr(cls, "config_class", None) for cls in classes if getattr(cls, "__module__", "") == module)
    return list(dict.fromkeys(config.model_type for config in configs if config is not None))


def shrink(default: PreTrainedConfig, *, ratios: bool = False, sizes: Sizes = SIZES) -> PreTrainedConfig:
    """A tiny config of the same class as `default`; nested configs are made tiny too.

    Args:
        ratios: keep the ratios of sizes to the hidden size, as far as they are whole, instead of usual sizes.
        sizes: by name of a field.
    """
    return _shrink(default, frozenset(_widths(default)), ratios, sizes)


def _shrink(default: PreTrainedConfig, widths: frozenset[int], ratios: bool, sizes: Sizes) -> PreTrainedConfig:
    given = default.to_dict()
    given |= {name: given.get(stored) for name, stored in default.attribute_map.items()}
    values = _set_by_the_model(default, given)
    values |= {name: size for name, size in sizes.items() if given.get(name) or (name in given and name in NEEDED)}
    values |= _sizes_by_width(given, widths, ratios, sizes["hidden_size"])
    if given.get("num_key_value_heads") == given.get("num_attention_heads"):
        values["num_key_value_heads"] = HEADS
    if given.get("n_group") == 1:
        values["n_group"] = 1
    if given.get("head_dim") and given["head_dim"] == sum(
        given.get(f"qk_{of}_head_dim") or 0 for of in ("nope", "rope")
    ):
        values["head_dim"] = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
    for name, size in values.items():
        if isinstance(given.get(name), list | tuple) and isinstance(size, int):
            values[name] = [size] * len(given[name])
    values |= _layers(given, "num_hidden_layers" if "num_hidden_layers" in given else "depth", sizes)
    values |= {name: 0.0 for name, value in given.items() if "dropout" in name and isinstance(value, float)}
    values |= _rotary_sections(given, values.get("head_dim") or sizes["hidden_size"] // HEADS)
    values |= {name: _inner_layers(given[name]) for name in given if name.startswith("vision_feature_layer")}
    overrides = OVERRIDES.get(default.model_type, {})
    if Version(installed_release().version) < Version("5.15"):
        overrides = {**overrides, **ONE_CHUNK_BEFORE_5_15.get(default.model_type, {})}
    if given.get("is_encoder_decoder"):
        # Not a field of each config class, although the loss needs it.
        overrides = {"decoder_start_token_id": SIZES["bos_token_id"], **overrides}
    values |= overrides
    nested = {name: config for name in default.sub_configs if (config := _sub_config(default, name)) is not None}
    values |= {
        name: _shrink(config, widths, ratios, sizes).to_dict() for name, config in nested.items() if name not in values
    }
    values |= _token_ids(given) if len(nested) > 1 else _special_token_ids(given)
    if given.get("image_grid_pinpoints"):
        values["image_grid_pinpoints"] = [[IMAGE, 2 * IMAGE], [2 * IMAGE, IMAGE], [2 * IMAGE, 2 * IMAGE]]
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


def _sizes_by_width(given: dict[str, Any], widths: frozenset[int], ratios: bool, hidden_size: int) -> dict[str, int]:
    """Sizes that follow from a hidden size of the model: those that no rule has, and with `ratios` all.

    Args:
        hidden_size: the tiny one.
    """
    own = [given[name] for name in _WIDTHS if type(given.get(name)) is int and given[name]]
    found = {}
    for name, value in given.items():
        if type(value) is not int or value < _SMALLEST_WIDTH or not name.endswith(_WIDTH_NAMES):
            continue
        if name not in SIZES and value in widths:
            found[name] = hidden_size
        elif ratios and name.endswith(_SIZES_BY_WIDTH):
            scaled = next((s for width in (*own, *sorted(widths)) if (s := _scaled(value, width, hidden_size))), None)
            found |= {} if scaled is None else {name: scaled}
    return found


def _scaled(value: int, width: int, hidden_size: int) -> int | None:
    """The tiny size whose ratio to the tiny hidden size is that of `value` to `width`; None if that is not whole."""
    size, rest = divmod(hidden_size * value, width)
    small, large = min(value, width), max(value, width)
    return size if not rest and not large % small and large <= _MOST_RATIO * small else None


def _set_by_the_model(default: PreTrainedConfig, given: dict[str, Any]) -> dict[str, Any]:
    """Fields to which the config that holds this one gives other values than its class."""
    usual = type(default)().to_dict()
    kept = (int, float, str, bool)
    return {name: v for name, v in given.items() if isinstance(v, kept) and name in usual and usual[name] != v}


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
    media = sorted(name for name in names if name not in SIZES)
    return {name: TEXT_VOCABULARY + i % (VOCABULARY - TEXT_VOCABULARY) for i, name in enumerate(media)}


def _special_token_ids(given: dict[str, Any]) -> dict[str, int]:
    """Different ids of the placeholders that the config of an encoder has itself, and of what is outside of a tiny
    vocabulary."""
    names = [f"{kind}_token_id" for kind in _KINDS]
    others = [name for name in given if name.endswith("_token_id") and name not in (*SIZES, *names)]
    others = [name for name in others if type(given[name]) is int and given[name] >= VOCABULARY]
    # Encoders of one model have configs of their own, and need different ids.
    ids = {name: VOCABULARY - 1 - i for i, name in enumerate([*names, *others])}
    return {name: id for name, id in ids.items() if name in others or isinstance(given.get(name), int)}


def _rotary_sections(given: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Rotary parameters whose sections, one for each axis of positions, fit the tiny head size."""
    found: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        rope: Any = given.get(name)
        per_layer_kind = isinstance(rope, dict) and any(isinstance(value, dict) for value in rope.values())
        reads = name == "rope_parameters" and "num_key_value_heads" in given and _reads_sections(given["model_type"])
        if reads and not per_layer_kind:
            rope = {**MROPE, **(rope or {})}
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
    return max(-LAYERS, min(chosen, LAYERS - 1)) if isinstance(chosen, int) else chosen


def _reads_sections(model_type: str) -> bool:
    """Whether the code of a model_type reads sections of its rotary embedding, which default configs may lack."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    file = installed_release().path(modeling_module(model_type_to_module_name(model_type)))
    return file.is_file() and '"mrope_section"' in file.read_text()


def _layers(given: dict[str, Any], counted: str, sizes: Sizes) -> dict[str, Any]:
    """Fields with a value per layer or with numbers of layers, for one layer of each kind, in their order.

    Args:
        counted: the field with the number of layers.
        sizes: of layers, by name of a field.
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
    chosen = chosen * LAYERS if len(chosen) == 1 else chosen
    small = {name: [_small(value[layer], sizes.get(name)) for layer in chosen] for name, value in per_layer.items()}
    small |= {name: [i for i, layer in enumerate(chosen) if layer in value] for name, value in numbers.items()}
    return {**small, **shared, counted: len(chosen)}


def _are_layers(name: str, value: list[Any], count: Any) -> bool:
    """Whether a list has numbers of layers, e.g. those with experts."""
    if not isinstance(count, int):
        return False
    named = "layer" in name or name.endswith(("_idxs", "_indices", "_indexes"))
    integers = all(type(n) is int for n in value)
    return named and bool(value) and integers and value == sorted({*value}) and value[-1] < count


def _small(value: Any, size: Any) -> Any:
    """A layer's value of a field, which has a tiny `size`, or None."""
    return size if size is not None and isinstance(value, int) and value else value
