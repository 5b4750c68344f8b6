"""The processor of a multimodal checkpoint, and the class that trains with it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opslot._base.errors import ConfigError, missing_package
from opslot._base.files import read_json_object
from opslot._base.hub import local_model
from opslot._base.logging import get_logger
from opslot._base.source import method_parameters
from opslot.data.multimodal.rope_positions import RopePositions
from opslot.models import MODEL_PROCESSOR_REGISTRY, trained_config
from opslot.models._build import multimodal_auto_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin

logger = get_logger(__name__)

_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


def load_processor(path: str | Path, *, trust_remote_code: bool = False) -> ProcessorMixin:
    """The processor in a checkpoint's folder: of the class that `MODEL_PROCESSOR_REGISTRY` has for the class name in
    its processor_config.json, else Transformers' own.

    Without torchvision, Transformers has no video processors; a processor is then loaded without its own.

    Raises:
        ConfigError: no processor, one that takes no text, or files that cannot be read.
    """
    from transformers import AutoProcessor, ProcessorMixin

    folder = local_model(path, weights=False)
    folder = folder.parent if folder.is_file() else folder
    hint = "copy processor_config.json, preprocessor_config.json and the tokenizer's files from the checkpoint"
    files = [name for name in _FILES[:2] if (folder / name).is_file()]
    if not files:
        raise ConfigError(f"task vlm needs a processor, and {folder} has neither {' nor '.join(_FILES[:2])}", hint=hint)
    name = _class_name(folder)
    try:
        if name is not None and name in MODEL_PROCESSOR_REGISTRY:
            cls: Any = MODEL_PROCESSOR_REGISTRY.get(name)()
        else:
            cls = _without_video(name) or AutoProcessor
        options = {"trust_remote_code": True} if trust_remote_code and cls is AutoProcessor else {}
        processor = cls.from_pretrained(str(folder), local_files_only=True, **options)
    except Exception as error:
        what = f"the processor in {folder} cannot be read"
        if package := missing_package(error):
            raise ConfigError(f"{what}: {package} is not installed", hint=f"pip install {package}") from error
        raise ConfigError(f"{what}: {error}", hint=hint) from error
    if not isinstance(processor, ProcessorMixin):
        raise ConfigError(
            f"the processor in {folder} is not complete", found=f"only a {type(processor).__name__}", hint=hint
        )
    parameters = method_parameters(type(processor), "__call__")
    # One with *args may take it there.
    if "text" not in parameters and not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        raise ConfigError(
            f"task vlm cannot train with {type(processor).__name__}, which takes no text: it makes the inputs of the "
            "model from images or audio alone",
            hint="use a model whose processor takes text too, such as voxtral or qwen3_omni_moe for audio",
        )
    return processor


def has_processor(path: str | Path) -> bool:
    """Whether a checkpoint's folder has files of a processor."""
    return any((local_model(path, weights=False) / name).is_file() for name in _FILES[:2])


def rope_positions(config: PreTrainedConfig) -> RopePositions:
    """Of the model that a checkpoint with this config trains; its errors are those of `multimodal_class`."""
    trained = trained_config(config, multimodal_class(config))
    return RopePositions(trained, multimodal_class(trained))


def multimodal_class(config: PreTrainedConfig) -> str:
    """Name of the Transformers class that a config's checkpoint has: with its encoders, for generation.

    Raises:
        ConfigError: Transformers has only language models of this type, or the model is an encoder-decoder.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"task vlm cannot train {config.model_type!r}, an encoder-decoder: its encoder would read the answers",
            hint="use a vision-language or omni model with a decoder alone, such as qwen3_vl",
        )
    named = next(iter(config.architectures or ()), None)
    if named is not None and named.endswith("ForConditionalGeneration") and hasattr(transformers, named):
        return str(named)
    if (found := multimodal_auto_class(config)) is not None:
        return found[1]
    if config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"task vlm needs a model with images, video or audio, and {config.model_type!r} is a language model",
            hint="set task: sft, or model.config_path to a vision-language or omni model",
        )
    raise ConfigError(
        f"task vlm needs a model that generates text from images, video or audio, and Transformers has none of type "
        f"{config.model_type!r}",
        found=named or "",
        hint="set model.config_path to a vision-language or omni model; other models take the kernels of "
        "opslot.apply(model) in a training loop of your own",
    )


def _class_name(folder: Path) -> str | None:
    names = (read_json_object(folder / file).get("processor_class") for file in _FILES)
    return next((name for name in names if isinstance(name, str)), None)


def _without_video(name: str | None) -> Any:
    """The processor class without its video processor, if torchvision is missing; else None."""
    import transformers

    if importlib.util.find_spec("torchvision") is not None:
        return None
    theirs: Any = getattr(transformers, str(name), None)
    if theirs is None or "video_processor" not in theirs.get_attributes():
        return None
    logger.warning("torchvision is not installed, so %s takes no video; pip install torchvision", name)
    kept = [part for part in theirs.get_attributes() if part != "video_processor"]
    # Constructors pass their parts on in the order of the attributes, so the missing one is dropped.
    return type(theirs.__name__, (theirs,), {"get_attributes": classmethod(lambda cls: kept)})
