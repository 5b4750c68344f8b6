"""Generation with Transformers' `generate`, with the chat template applied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opslot.data.content_forms import ContentForms
from opslot.data.multimodal.processor_call import special_tokens_option
from opslot.data.multimodal.token_templates import renders_tokens

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


def generate_answers(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    max_new_tokens: int,
    *,
    chat: bool | None = None,
    system: str | None = None,
    as_processor: bool = False,
    device: torch.device | str | None = None,
    sampling: dict[str, Any] | None = None,
) -> list[str]:
    """The text that `model` continues each prompt with, without special tokens.

    Args:
        chat: take each prompt as a user's turn and apply the chat template; default whether the tokenizer has one.
        system: content of a system message before the user's turn.
        as_processor: add special tokens as a processor does, see `special_tokens_option`.
        sampling: options of `generate`, such as temperature; default the most likely token at each step.
    """
    import torch

    answers = []
    options = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, **(sampling or {})}
    in_form = ContentForms(lambda messages, _: (str(tokenizer.apply_chat_template(messages, tokenize=False)), None))
    as_tokens = renders_tokens(tokenizer)
    has_template = as_tokens or bool(getattr(tokenizer, "chat_template", None))
    for prompt in prompts:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        if not has_template or chat is False:
            ids = tokenizer(prompt)["input_ids"]
        elif as_tokens:
            ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        else:
            text = str(tokenizer.apply_chat_template(in_form(messages), add_generation_prompt=True, tokenize=False))
            special = special_tokens_option(tokenizer, text) if as_processor else {"add_special_tokens": False}
            ids = tokenizer(text, **special)["input_ids"]
        inputs = torch.tensor([ids], device=device)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        output = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_new_tokens,
            pad_token_id=pad,
            eos_token_id=_end_tokens(model, tokenizer),
            **options,
        )
        answers.append(str(tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)))
    return answers


def _end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """End-of-sequence tokens of the model's generation config and of the tokenizer."""
    known = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = {*(known if isinstance(known, list) else [known]), tokenizer.eos_token_id} - {None}
    return sorted(ends) or None
