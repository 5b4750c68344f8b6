"""`build_foundation_model`: construct a model from a config, move it to its generated classes, bind kernels, load."""

from __future__ import annotations

import copy
import glob
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opslot._base.device import usable_device
from opslot._base.dtypes import floating_dtype
from opslot._base.errors import ConfigError, missing_package
from opslot._base.hub import local_model
from opslot._base.logging import get_logger
from opslot.models._apply import apply, bind_everywhere, has_slots, nothing_to_bind
from opslot.models._config_values import check_values, padding_problem
from opslot.models._registry import (
    ARCHITECTURES,
    MODEL_CONFIG_REGISTRY,
    MODELING_REGISTRY,
    architecture_of,
    converters_of,
    serve_model_type,
)
from opslot.slots import KERNEL_REGISTRY, OpsImplementationConfig
from opslot.slots.protocol import sub_model

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from opslot.checkpoint.load import LoadReport

logger = get_logger(__name__)

BACKEND_VARIABLE = "OPSLOT_BACKEND"


def build_foundation_model(
    config_path: str | Path | PreTrainedConfig,
    weights_path: str | Path | None = None,
    torch_dtype: torch.dtype | str | None = None,
    init_device: str = "cpu",
    ops_implementation: OpsImplementationConfig | Mapping[str, Any] | str | None = None,
    *,
    architecture: str | None = None,
    config_kwargs: Mapping[str, Any] | None = None,
    run_device: str | None = None,
    run_dtype: torch.dtype | str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Construct a Transformers model, apply opslot's slots to every module in it, bind its kernels, load weights.

    Args:
        config_path: a folder with config.json, that file, a model of the Hugging Face hub (ORG/NAME or
            ORG/NAME@REVISION), or a config object (copied, never changed).
        weights_path: folder of a Hugging Face checkpoint (safetensors, sharded or not), or a model of the hub; None
            leaves random weights, drawn from torch's generator as Transformers draws them.
        torch_dtype: parameters' dtype, e.g. "bfloat16"; default the config's, else float32.
        init_device: "cpu", "cuda", "npu", or "meta" for parameters without memory (then without `weights_path`).
        ops_implementation: kernels, as `OpsImplementationConfig` reads them; default "auto".
        architecture: class name, for a multimodal config also that of its language model alone; default the first of
            the config's `architectures`, else that of Transformers' Auto classes: <Model>ForConditionalGeneration with
            images or audio, <Model>ForCausalLM without.
        config_kwargs: values that override the config's.
        run_device: what kernels are chosen for; default `init_device`, and for "meta" this machine's best device.
        run_dtype: what the model will compute in, where autocast or FSDP2's mixed precision makes that another dtype
            than its parameters', e.g. "bfloat16" for float32 parameters; kernels are chosen for it.
        trust_remote_code: allow config and model classes that ship with the checkpoint (`auto_map`) to run.

    Returns:
        The model, in training mode; `opslot.explain(model)` is its kernel table. With OPSLOT_BACKEND=hf it is
        Transformers' own class, untouched and unbound.

    Raises:
        ConfigError: unreadable config, unknown architecture, dtype or device, or kernels that cannot be bound.
        CheckpointError: weights that do not fit the model exactly.
    """
    from opslot.checkpoint.quantized import remove_quantization_config

    ops = OpsImplementationConfig.make(ops_implementation)
    config = load_config(config_path, trust_remote_code=trust_remote_code, **(config_kwargs or {}))
    remove_quantization_config(config)  # it describes the hub's weights; the model's are not quantized
    backend = os.environ.get(BACKEND_VARIABLE, "opslot")
    if backend not in ("opslot", "hf"):
        raise ConfigError(f"{BACKEND_VARIABLE}={backend!r} is unknown", hint="use opslot or hf")
    if init_device == "meta" and weights_path is not None:
        raise ConfigError(
            "init_device='meta' makes parameters without memory, so weights_path cannot be read into them",
            hint=(
                "leave weights_path out and call opslot.checkpoint.load_weights(model, folder, "
                "device=...), or initialize_weights(model), once the model is sharded"
            ),
        )
    dtype = _dtype(torch_dtype, config)
    computed = None if run_dtype is None else floating_dtype(run_dtype, f"run_dtype={run_dtype!r}")
    usable_device(init_device)
    cls = _model_class(config, architecture, backend, trust_remote_code)
    model = _instantiate(cls, config, dtype, init_device, run_device, empty=weights_path is not None)
    if backend == "hf":
        logger.info("%s=hf: Transformers' own %s, without slots", BACKEND_VARIABLE, cls.__name__)
        if named := ops.named_kernels():
            logger.warning("%s=hf, so these kernels are not used: %s", BACKEND_VARIABLE, ", ".join(named))
    else:
        device = run_device or (None if init_device == "meta" else init_device)
        put = bind_everywhere if not has_slots(model) and _has_kernels_per_module(model) else apply
        put(model, ops, device=device, dtype=computed)
    if weights_path is not None:
        load_foundation_weights(model, weights_path)
    model.train()
    return model


def load_config(
    source: str | Path | PreTrainedConfig, *, trust_remote_code: bool = False, **overrides: Any
) -> PreTrainedConfig:
    """Read a Transformers config from a folder, a config.json, a model of the hub or an object (then a copy).

    Raises:
        ConfigError: the path or its model_type does not exist, the JSON is broken, or a value is not valid.
    """
    from transformers import PreTrainedConfig

    if isinstance(source, PreTrainedConfig):
        config = copy.deepcopy(source)
        for name, value in overrides.items():
            try:
                setattr(config, name, value)
            except Exception as error:
                raise ConfigError(
                    f"{name}={value!r} is not a valid value for a {config.model_type} config",
                    found=str(error),
                    hint="give a value of the type that config.json has",
                ) from error
        check_values(config, "the config")
        return config
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"config_path={source!r} is not a path or a config",
            hint="give a folder with config.json, that file, a model of the hub or a config object",
        )
    file = _config_file(local_model(source, weights=False))
    config = _read_config(file, trust_remote_code, overrides)
    check_values(config, str(file))
    return config


def _config_file(path: Path) -> Path:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        names = sorted(p.name for p in path.iterdir())[:8] if path.is_dir() else []
        hint = "give a folder with config.json, that file, or a model of the Hugging Face hub as ORG/NAME"
        if "adapter_config.json" in names:
            hint = "it has LoRA adapters: give the folder of their base model, or add them to it with opslot merge"
        elif (path / "hf" / "config.json").is_file():
            hint = f"it is the folder of a run: give {path / 'hf'}"
        raise ConfigError(
            f"config_path={str(path)!r} is not a model's config",
            found=f"the folder holds {', '.join(names) or 'nothing'}" if path.is_dir() else "no such file or folder",
            hint=hint,
        )
    return file


def _read_config(file: Path, trust_remote_code: bool, overrides: Mapping[str, Any]) -> PreTrainedConfig:
    from transformers import AutoConfig

    try:
        data = json.loads(file.read_text(), object_hook=_decode_float)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid JSON", found=str(error), hint="copy or download it again") from error
    model_type = data.get("model_type") if isinstance(data, dict) else None
    if not isinstance(model_type, str):
        raise ConfigError(
            f"{file} names no model_type, so its architecture is unknown", hint='add e.g. "model_type": "qwen3"'
        )
    if "auto_map" in data and trust_remote_code:
        return AutoConfig.from_pretrained(file.parent, trust_remote_code=True, **overrides)
    try:
        cls = _config_class(model_type)
    except ConfigError:
        if "auto_map" in data:
            raise _code_may_not_run(f"the model_type {model_type!r}") from None
        raise
    data = {**data, **overrides}
    try:
        return cls.from_dict(data)
    except Exception as error:
        raise config_error(f"{file} is not a valid {model_type} config", data, error) from error


def _decode_float(value: dict[str, Any]) -> Any:
    """Infinity and NaN, which JSON has not, are {"__float__": "Infinity"} in a config that Transformers saved."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _config_class(model_type: str) -> type[PreTrainedConfig]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in MODEL_CONFIG_REGISTRY and model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    return MODEL_CONFIG_REGISTRY.get(model_type)()


def config_error(what: str, config: Mapping[str, Any], error: Exception) -> ConfigError:
    """The error for a config that Transformers failed on with `error`; names the sizes that may have caused it.

    Transformers divides by the number of heads without checking it, and torch raises for tensors of negative size.
    """
    if package := missing_package(error):
        return ConfigError(f"{what}: {package} is not installed", hint=f"pip install {package}")
    zero = isinstance(error, ZeroDivisionError)
    faulty = [f"{name}={size}" for name, size in _sizes_in(config) if (size == 0 if zero else size < 0)]
    if isinstance(error, AssertionError) and (found := padding_problem(config)):
        hint = "set pad_token_id to the id of a token in the vocabulary, or null"
        return ConfigError(what, found=found, hint=hint)
    if faulty and isinstance(error, ZeroDivisionError | RuntimeError):
        which = "it" if len(faulty) == 1 else "each that the model needs"
        return ConfigError(f"{what}: {error}", found=", ".join(faulty), hint=f"set {which} to 1 or more")
    return ConfigError(
        f"{what}: {type(error).__name__}: {error}",
        hint="fix the value in config.json; --traceback shows where Transformers reads it",
    )


def _sizes_in(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    """Fields that count heads, layers or channels, those of nested configs too, by their names."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _sizes_in(value, f"{prefix}{name}.")
        elif isinstance(value, int) and (name.startswith(("num_", "n_")) or name.endswith(("_size", "_dim", "_heads"))):
            yield prefix + name, value


def _dtype(value: torch.dtype | str | None, config: PreTrainedConfig) -> torch.dtype:
    import torch

    if value is None:
        value = getattr(config, "dtype", None) or torch.float32
    return floating_dtype(value, f"torch_dtype={value!r}")


def _model_class(config: PreTrainedConfig, architecture: str | None, backend: str, trust_remote_code: bool) -> type:
    """The class to construct: Transformers' own, that of a registered architecture, one beside the checkpoint, or one
    that the user registered with the Auto classes.

    Raises:
        ConfigError: no such class, or nothing in its models gets a slot.
    """
    import transformers

    model_type = config.model_type
    name = architecture or _named_class(config) or auto_class_name(config)
    # As the Auto classes do, code that ships with the checkpoint comes first where it may run.
    shipped = shipped_class(config, name, True) if trust_remote_code else None
    if shipped is not None:
        return shipped
    if backend == "opslot" and serve_model_type(model_type):
        cls = MODELING_REGISTRY.get(model_type)(name)
        # A patch may change what is constructed, which discovered slots never do.
        found = None if model_type in ARCHITECTURES else architecture_of(cls, generated=True)
        return (found and found.upstream_class(name)) or cls
    theirs: Any = getattr(transformers, name, None) or registered_class(config, name)
    if theirs is None:
        shipped_class(config, name, False)
        raise ConfigError(
            f"Transformers has no class {name!r} for model_type {model_type!r}",
            hint="give architecture, or architectures in config.json, the name of one that it has",
        )
    if backend == "opslot" and theirs.__module__.startswith("transformers."):
        empty = _instantiate(theirs, copy.deepcopy(config), None, "meta", None, empty=True)
        if not has_slots(empty) and not _has_kernels_per_module(empty):
            raise nothing_to_bind(empty)
    return theirs


def _has_kernels_per_module(model: Any) -> bool:
    """Whether `auto` selects kernels for modules without slots, such as layer norms."""
    return any(
        KERNEL_REGISTRY.selected_by_auto(op.name, variant)
        for op in KERNEL_REGISTRY.ops.values()
        if op.per_module and op.applies_to is not None
        for module in model.modules()
        if (variant := op.applies_to(module, model.config)) is not None
    )


def registered_class(config: PreTrainedConfig, name: str | None) -> Any:
    """The class of that name, or the first of any, that a user registered with Transformers' Auto classes for a config
    class; None without one."""
    from transformers.models.auto import modeling_auto

    for kind in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION"):
        found = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING").get(type(config), None)
        if isinstance(found, type) and name in (None, found.__name__):
            return found
    return None


def shipped_class(config: PreTrainedConfig, name: str, trust_remote_code: bool) -> Any:
    """The class in Python code that ships with the checkpoint, from the config's `auto_map`; None without one.

    Raises:
        ConfigError: the code may not run.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    for auto_class, entry in (getattr(config, "auto_map", None) or {}).items():
        if isinstance(entry, str) and entry.rpartition(".")[2] == name:
            if not trust_remote_code:
                raise _code_may_not_run(name)
            found = get_class_from_dynamic_module(entry, config.name_or_path)
            # As the Auto classes do: the code is then saved with the weights.
            found.register_for_auto_class(auto_class)
            return found
    return None


class ShippedCodeError(ConfigError):
    """A class is in Python code that ships with the checkpoint, which was not allowed to run."""


def _code_may_not_run(what: str) -> ShippedCodeError:
    return ShippedCodeError(
        f"{what} is in Python code that ships with the checkpoint, which runs only if you allow it",
        hint=(
            "if you trust its author, give --trust-remote-code (in a training configuration model.trust_remote_code, in"
            " Python trust_remote_code=True)"
        ),
    )


def _named_class(config: PreTrainedConfig) -> str | None:
    """The class that the config names; None without one, or for one that Transformers lacks and has a successor of.

    Published configs name classes of early releases.
    """
    import transformers

    name = next(iter(config.architectures or ()), None)
    if name is None or hasattr(transformers, name):
        return name
    try:
        successor = auto_class_name(config)
    except ConfigError:
        return name
    logger.warning(
        "config.json names the class %s in architectures, which Transformers does not have; taking %s", name, successor
    )
    return successor


_MULTIMODAL_AUTO_CLASSES = {
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "AutoModelForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    # Decoders with audio that no other mapping has (Audio Flamingo 3), beside encoder-decoders of text.
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}


def multimodal_auto_class(config: PreTrainedConfig) -> tuple[str, str] | None:
    """Transformers' Auto class for text from images, video or audio that has the config's type, and the class that it
    builds; None without one."""
    from transformers.models.auto import modeling_auto

    for auto, names in _MULTIMODAL_AUTO_CLASSES.items():
        found = getattr(modeling_auto, names, {}).get(config.model_type)
        if found and not (auto == "AutoModelForSeq2SeqLM" and config.is_encoder_decoder):
            return auto, found if isinstance(found, str) else found[0]
    return None


def auto_class_name(config: PreTrainedConfig, *, masked: bool = False) -> str:
    """The class that Transformers' Auto classes take for a language model: with vision or audio where the config has.

    Args:
        masked: also a masked language model, if the config has no other class.

    Raises:
        ConfigError: there is none.
    """
    from transformers.models.auto import modeling_auto

    kinds = ["IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", *["MASKED_LM"] * masked]
    for kind in kinds:
        found = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").get(config.model_type)
        if found:
            return found if isinstance(found, str) else found[0]
    raise ConfigError(
        f"the config names no class for model_type {config.model_type!r}, and Transformers has no language model of it",
        hint='give architecture, or "architectures" in config.json, the name of a class',
    )


def _part_of(config: PreTrainedConfig, cls: Any) -> PreTrainedConfig:
    """The part of a multimodal config that a class of its language model has, as the Auto classes take it."""
    own = getattr(cls, "config_class", None)
    if own is None or isinstance(config, own):
        return config
    parts = (getattr(config, name, None) for name, part in config.sub_configs.items() if part is own)
    return next(filter(None, parts), config)


def _instantiate(
    cls: Any, config: PreTrainedConfig, dtype: torch.dtype | None, device: str, run_device: str | None, empty: bool
) -> PreTrainedModel:
    """Make the model in `dtype` on `device`; `empty` skips the random draw that weights will overwrite."""
    from contextlib import ExitStack

    import torch
    from transformers.initialization import no_init_weights

    from opslot.models._meta import with_parameters_on_meta

    # The modeling code of Transformers can compute buffers after the construction, in `_init_weights`.
    has_buffers = device == "meta" and not cls.__module__.startswith(("transformers.", "opslot.generated."))
    empty = empty or has_buffers
    config = _part_of(config, cls)
    with ExitStack() as stack:
        if not has_buffers:
            stack.enter_context(torch.device(device))
        if empty:
            stack.enter_context(no_init_weights())
        make = partial(cls._from_config, config, **({} if dtype is None else {"dtype": dtype}))
        try:
            model = with_parameters_on_meta(make, run_device or "cpu") if has_buffers else make()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise config_error(f"{cls.__name__} cannot be built from its config", config.to_dict(), error) from error
    if empty:
        # Transformers ties weights in the same place where it draws them.
        model.tie_weights()
    return model


def load_foundation_weights(
    model: PreTrainedModel, folder: str | Path, device: torch.device | str | None = None
) -> LoadReport:
    """`opslot.checkpoint.load_weights` with the converters of the model's architecture.

    Args:
        model: built by `build_foundation_model`, on any device or on meta, sharded or not.
        folder: a Hugging Face checkpoint, or a model of the hub, ORG/NAME.
        device: where meta parameters get memory.

    Raises:
        CheckpointError: weights that do not fit the model exactly.
    """
    from opslot.checkpoint import load_weights
    from opslot.checkpoint.folder import read_folder

    folder = local_model(folder)
    heads = classifier_heads(model)
    declared = sub_model(type(model))
    excluded = [f"{part}.*" for part in declared.excluded] if declared is not None else []
    if heads:
        # A classifier starts from a language model's checkpoint: its own head is new, as is the pooler that a head
        # reads, and the language model's have no place in it.
        heads.append(f"{model.base_model_prefix}.pooler")
        excluded = list(map(glob.escape, _outside_base(model, read_folder(folder))))
    return load_weights(
        model,
        folder,
        converters=converters_of(model),
        device=device,
        allow_missing=[f"{name}.*" for name in heads],
        allow_extra=excluded,
    )


def _outside_base(model: PreTrainedModel, names: Iterable[str]) -> Iterator[str]:
    """The tensors of a checkpoint in no child of the base model."""
    prefix = f"{model.base_model_prefix}."
    inside = {name.partition(".")[0] for name in model.base_model.state_dict()}
    return (name for name in names if name.removeprefix(prefix).partition(".")[0] not in inside)


def classifier_heads(model: nn.Module) -> list[str]:
    """Names of the modules with parameters that a sequence or token classifier adds to its base model."""
    if not type(model).__name__.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return []
    base: Any = getattr(model, "base_model_prefix", "")
    return [name for name, child in model.named_children() if name != base and any(True for _ in child.parameters())]
