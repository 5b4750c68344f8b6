"""`opslot generate`: answers of a checkpoint, with Transformers' `generate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from opslot._base.errors import ConfigError
from opslot._base.hub import local_model

_HINT = "give the folder of a causal language model, such as <output_dir>/hf"
# Options that are fields of `Limits`.
_LIMITS = ("max_pixels", "max_frames", "max_fps")


def run(options: argparse.Namespace) -> int:
    """Print the answer to each prompt.

    Raises:
        ConfigError: no checkpoint of a model that generates text in the folder, or media that it does not take.
    """
    import torch
    from transformers.utils import logging

    from opslot._base.device import best_device, usable_device
    from opslot.checkpoint.adapters import base_folder, read_adapter_config
    from opslot.data.encoder import SampleError
    from opslot.data.multimodal.media import Limits
    from opslot.data.tokenizer import load_tokenizer
    from opslot.models import load_config
    from opslot.trainer.generating import answer_about_media, generate_answer, media_encoder
    from opslot.trainer.processors import has_processor

    model, prompts, media = str(local_model(options.model, weights=False)), options.prompt, options.media or []
    target = usable_device(options.device or best_device().type)
    base = _base_of(model, options.trust_remote_code)
    # PEFT saves adapters without the tokenizer of their base model.
    has_tokenizer = any((Path(model) / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json"))
    tokenizer = load_tokenizer(model if has_tokenizer else base, trust_remote_code=options.trust_remote_code)
    _check(options, tokenizer, model)
    config = load_config(base, trust_remote_code=options.trust_remote_code)
    encoder = None
    if media:
        encoder = media_encoder(
            model,
            config,
            Limits(**{name: value for name in _LIMITS if (value := getattr(options, name)) is not None}),
            options.use_audio_in_video,
            trust_remote_code=options.trust_remote_code,
        )
    # Last, since weights of the hub take long.
    local_model(options.model)
    base_folder(read_adapter_config(model))
    logging.disable_progress_bar()
    loaded = _load(model, base, config, options.trust_remote_code).to(target).eval()
    torch.manual_seed(options.seed)
    sampling = {"do_sample": True, "temperature": options.temperature} if options.temperature > 0 else None
    common: dict[str, Any] = {"system": options.system, "device": target, "sampling": sampling}
    of_text = {"chat": False if options.raw else None, "as_processor": has_processor(model), **common}
    with torch.no_grad():
        for prompt in prompts:
            try:
                if encoder is not None:
                    answer = answer_about_media(loaded, encoder, prompt, media, options.max_new_tokens, **common)
                else:
                    answer = generate_answer(loaded, tokenizer, prompt, options.max_new_tokens, **of_text)
            except SampleError as error:
                given = ", ".join(path for _, path in media)
                hint = "give files that this model takes" if media else "correct the chat template, or pass --raw"
                raise ConfigError(f"--prompt{' with ' if media else ''}{given}: {error}", hint=hint) from error
            if len(prompts) > 1:
                print(f">>> {prompt}")
            print(answer)
    return 0


def _check(options: argparse.Namespace, tokenizer: Any, folder: str) -> None:
    """Raise ConfigError for options that exclude each other, and for media that are not files."""
    media, has_turns = options.media or [], bool(tokenizer.chat_template) and not options.raw
    if options.system is not None and not has_turns:
        why = "--raw is given" if options.raw else f"the tokenizer in {folder} has none"
        raise ConfigError(f"--system needs a chat template, and {why}", hint="leave out --system")
    if "" in options.prompt and not has_turns and not tokenizer("")["input_ids"]:
        raise ConfigError(
            "--prompt is empty, and the model needs a token to continue from", hint="give a prompt of one token or more"
        )
    if media and options.raw:
        raise ConfigError(f"--{media[0][0]} needs a chat turn, and --raw is given", hint="leave out --raw")
    settings = {name: getattr(options, name) for name in _LIMITS}
    settings["use_audio_in_video"] = options.use_audio_in_video or None
    if not media and (given := next((name for name, value in settings.items() if value is not None), None)):
        raise ConfigError(
            f"--{given.replace('_', '-')} is of media, and none are given", hint="give --image or --video"
        )
    for kind, path in media:
        if not Path(path).is_file():
            raise ConfigError(f"--{kind}: {path} is not a file", hint="give the path of a file")


def _base_of(folder: str, trust_remote_code: bool) -> str:
    """The folder of the base model that the adapters in `folder` name; without adapters, `folder`."""
    from opslot.checkpoint.adapters import base_folder, read_adapter_config
    from opslot.models import load_config

    adapter = read_adapter_config(folder)
    base = str(base_folder(adapter, weights=False) or folder)
    config = load_config(base, trust_remote_code=trust_remote_code)
    classifiers = [name for name in getattr(config, "architectures", None) or () if name.endswith("Classification")]
    if classifiers or adapter.get("task_type") in ("SEQ_CLS", "TOKEN_CLS"):
        found = classifiers[0] if classifiers else f"adapters with task_type {adapter['task_type']}"
        raise ConfigError(f"{folder} has a classifier, which generates no text", found=found, hint=_HINT)
    return base


def _auto_class(config: Any) -> Any:
    """Of the class that the config names: with encoders, whose weights and adapters have other names than those of the
    language model alone (Qwen3.5 has both), or without."""
    import transformers
    from transformers.models.auto import modeling_auto

    from opslot.models._build import multimodal_auto_class

    found = multimodal_auto_class(config)
    named = next(iter(config.architectures or ()), None)
    languages = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if found is not None and (named == found[1] or config.model_type not in languages):
        return getattr(transformers, found[0])
    return transformers.AutoModelForCausalLM


def _load(folder: str, base: str, config: Any, trust_remote_code: bool) -> Any:
    from opslot.checkpoint.adapters import load_adapter

    model = _text_model(base, config) or _corrected(_transformers_model(base, config, trust_remote_code))
    if base != folder:
        load_adapter(model, folder)
    return model


def _text_model(base: str, config: Any) -> Any:
    """An omni model without its speech parts, with which Transformers' class generates audio; None for another."""
    from opslot.models import build_foundation_model
    from opslot.models._build import multimodal_auto_class
    from opslot.models._registry import declared_sub_model

    found = multimodal_auto_class(config)
    if found is None or declared_sub_model(config.model_type, found[1]) is None:
        return None
    return build_foundation_model(base, weights_path=base, ops_implementation="eager")


def _corrected(model: Any) -> Any:
    """`model`, with opslot's class where that changes more than slots: the forward of Llama 4 with images raises in
    Transformers 5.24."""
    import opslot
    from opslot.models.discovery.finder import additions
    from opslot.patchgen.names import architecture_in

    arch = architecture_in(type(model).__module__)
    if arch is not None and additions(arch) is not None:
        opslot.apply(model, "eager")
    return model


def _transformers_model(base: str, config: Any, trust_remote_code: bool) -> Any:
    import torch

    try:
        # Not of a folder with adapters: Transformers adds them without the magnitudes of DoRA.
        model, info = _auto_class(config).from_pretrained(
            base, trust_remote_code=trust_remote_code, local_files_only=True, dtype="auto", output_loading_info=True
        )
    except torch.OutOfMemoryError:
        raise
    # Of any model's constructor, and of damaged files.
    except Exception as error:
        found = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{base} is not a checkpoint that can generate", found=found, hint=_HINT) from error
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            f"{base} is not a checkpoint that can generate",
            found=f"no weights for {', '.join(missing[:3])}",
            hint=_HINT,
        )
    return model
