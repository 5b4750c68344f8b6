"""Generation with Transformers' `generate`, with the chat template applied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opslot._base.errors import ConfigError
from opslot.data.content_forms import ContentForms
from opslot.data.encoder import SampleError
from opslot.data.multimodal.loading import MediaLoader
from opslot.data.multimodal.media import Limits
from opslot.data.multimodal.processor_call import special_tokens_option
from opslot.data.multimodal.samples import MultimodalEncoder
from opslot.data.multimodal.token_templates import encoder_class, renders_tokens
from opslot.trainer.processors import load_processor, rope_positions

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


def generate_answer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int,
    *,
    chat: bool | None = None,
    system: str | None = None,
    as_processor: bool = False,
    device: torch.device | str | None = None,
    sampling: dict[str, Any] | None = None,
) -> str:
    """The text that `model` continues a prompt with, without special tokens.

    Args:
        chat: take the prompt as a user's turn and apply the chat template; default whether the tokenizer has one.
        system: content of a system message before the user's turn.
        as_processor: add special tokens as a processor does, see `special_tokens_option`.
        sampling: options of `generate`, such as temperature; default the most likely token at each step.

    Raises:
        SampleError: see `prompt_tokens`.
        ConfigError: end-of-sequence tokens in generation_config.json that are not ids.
    """
    import torch

    ids = prompt_tokens(tokenizer, prompt, chat=chat, system=system, as_processor=as_processor)
    tokens = torch.tensor([ids], device=device)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return _answer(model, tokenizer, inputs, max_new_tokens, sampling)


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    chat: bool | None = None,
    system: str | None = None,
    as_processor: bool = False,
) -> list[int]:
    """The tokens that a model gets for a prompt; the options are those of `generate_answer`.

    Raises:
        SampleError: a prompt that the chat template rejects, or without a token.
    """
    as_tokens = renders_tokens(tokenizer)
    has_template = as_tokens or bool(getattr(tokenizer, "chat_template", None))
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    if not has_template or chat is False:
        ids = tokenizer(prompt)["input_ids"]
    elif as_tokens:
        ids = _rendered(tokenizer, messages, tokenize=True, return_dict=True)["input_ids"]
    else:
        in_form = ContentForms(lambda messages, _: (str(tokenizer.apply_chat_template(messages, tokenize=False)), None))
        text = str(_rendered(tokenizer, in_form(messages), add_generation_prompt=True, tokenize=False))
        special = special_tokens_option(tokenizer, text) if as_processor else {"add_special_tokens": False}
        ids = tokenizer(text, **special)["input_ids"]
    if not ids:
        raise SampleError("it has no token")
    return list(ids)


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, **options)
    # A template may raise anything.
    except Exception as error:
        raise SampleError(f"the chat template rejects it: {error}") from error


def answer_about_media(
    model: Any,
    encoder: MultimodalEncoder,
    prompt: str,
    media: Sequence[tuple[str, str]],
    max_new_tokens: int,
    *,
    system: str | None = None,
    device: torch.device | str | None = None,
    sampling: dict[str, Any] | None = None,
) -> str:
    """As `generate_answer`, of a prompt with images, videos or audio before it in the same turn.

    Args:
        media: kind ("image", "video" or "audio") and path of each.

    Raises:
        SampleError: media that cannot be read, or that the processor or the chat template rejects.
    """
    given = encoder.prompt(conversation(prompt, media, system), Path())
    inputs: dict[str, Any] = {name: _moved(value, device, model.dtype) for name, value in given.items()}
    return _answer(model, encoder.tokenizer, inputs, max_new_tokens, sampling)


def conversation(text: str, media: Sequence[tuple[str, str]], system: str | None = None) -> list[dict[str, Any]]:
    """The messages of a user's turn with media, as (kind, path), before the text."""
    parts = [{"type": kind, "path": path} for kind, path in media]
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def _moved(value: Any, device: torch.device | str | None, dtype: torch.dtype) -> Any:
    """A tensor on the device, floats in a dtype; other values as they are."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() else None)


def media_encoder(
    folder: str,
    config: PreTrainedConfig,
    limits: Limits | None = None,
    use_audio_in_video: bool = False,
    *,
    trust_remote_code: bool = False,
) -> MultimodalEncoder:
    """The encoder of prompts for a model with this config.

    Args:
        folder: has the processor.
        limits, use_audio_in_video: as in `MediaLoader`.

    Raises:
        ConfigError: no processor, a model without encoders, or audio of videos with a processor that does not take it.
    """
    processor: Any = load_processor(folder, trust_remote_code=trust_remote_code)
    if getattr(processor, "chat_template", None):
        processor.tokenizer.chat_template = processor.chat_template
    positions = rope_positions(config)
    loader = MediaLoader(processor, limits, use_audio_in_video)
    return encoder_class(processor.tokenizer)(processor, positions.config, positions, 0, loader)


def _answer(
    model: Any,
    tokenizer: Any,
    inputs: dict[str, Any],
    max_new_tokens: int,
    sampling: dict[str, Any] | None,
) -> str:
    """The text that `model` continues `inputs` with."""
    options = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, **(sampling or {})}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ends = _end_tokens(model, tokenizer)
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, pad_token_id=pad, eos_token_id=ends, **options)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def _end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """End-of-sequence tokens of the model's generation config and of the tokenizer."""
    known = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = {*(known if isinstance(known, list) else [known]), tokenizer.eos_token_id} - {None}
    if not all(isinstance(end, int) for end in ends):
        raise ConfigError(
            "eos_token_id in generation_config.json is not an id",
            found=f"eos_token_id={known!r}",
            hint="set it to an integer or a list of integers",
        )
    return sorted(ends) or None
