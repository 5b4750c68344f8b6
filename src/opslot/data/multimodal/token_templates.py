"""Conversations for processors whose tokenizer renders them as tokens, without a text: those of mistral-common.

Such a tokenizer has no chat template and no character offsets, and its processor (Voxtral's) takes audio only in
`apply_chat_template`. So the trained parts are found in tokens: a turn of the assistant begins where the tokens of the
turns before it end.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from opslot._base.errors import ConfigError
from opslot._base.labels import IGNORE_INDEX
from opslot.data.chat import Rendered
from opslot.data.encoder import SampleError
from opslot.data.messages import Message
from opslot.data.multimodal.loading import Loaded
from opslot.data.multimodal.processor_call import REJECTED
from opslot.data.multimodal.samples import MultimodalEncoder


def renders_tokens(tokenizer: Any) -> bool:
    """Whether a tokenizer renders conversations as tokens by code of its own."""
    from transformers import PreTrainedTokenizerBase

    own = getattr(type(tokenizer), "apply_chat_template", None)
    return not getattr(tokenizer, "is_fast", False) and own is not PreTrainedTokenizerBase.apply_chat_template


def encoder_class(tokenizer: Any) -> type[MultimodalEncoder]:
    """The class that encodes conversations with this tokenizer."""
    return TokenTemplateEncoder if renders_tokens(tokenizer) else MultimodalEncoder


class TokenTemplateEncoder(MultimodalEncoder):
    """Encodes conversations with the `apply_chat_template` of a processor and its tokenizer.

    `Rendered.text` is the conversation as JSON, and `Rendered.spans` are of its messages.

    Raises:
        ConfigError: prompts that are joined as they are (data.chat_template: none).
    """

    needs_offsets = False

    def __init__(self, processor: Any, *args: Any, plain: bool = False, **options: Any) -> None:
        if plain or processor.tokenizer.chat_template:
            raise ConfigError(
                f"data.chat_template: {type(processor.tokenizer).__name__} has a template of its own",
                hint="remove the setting",
            )
        super().__init__(processor, *args, **options)
        self.plain = False

    def _conversation(self, messages: list[Message], tools: Any, first: int) -> list[Rendered]:
        text = json.dumps({"messages": messages, "tools": tools})
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        if self.train_on == "last":
            turns = turns[-1:]
        spans = None if self.train_on == "all" else [(turn, turn + 1) for turn in turns]
        return [Rendered(text, spans, messages)]

    def _prompt_text(self, messages: list[Message]) -> str:
        return json.dumps({"messages": messages, "tools": None})

    def _labels(self, sample: Rendered, loaded: Loaded, ids: torch.Tensor, expanded: str) -> np.ndarray:
        trained = np.full(len(ids), sample.spans is None)
        known = json.loads(sample.text)
        messages = self._with_media(known["messages"], loaded.media) if sample.spans else []
        for first, stop in sample.spans or ():
            before, through = (self._tokens(messages[:end], known["tools"]) for end in (first, stop))
            if ids[: len(through)].tolist() != through or through[: len(before)] != before:
                raise SampleError(
                    f"{type(self.tokenizer).__name__} renders the turns before an assistant's turn differently with "
                    "and without it, so the trained part is unknown; give each such turn as a sample with "
                    "data.train_on: last"
                )
            trained[len(before) : len(through)] = True
        return np.where(trained, ids, IGNORE_INDEX)

    def _process(self, description: Mapping[str, Any], loaded: Loaded) -> tuple[dict[str, torch.Tensor], str]:
        known = json.loads(description["text"])
        messages = self._with_media(known["messages"], loaded.media)
        asked = next((i for i in reversed(range(len(messages))) if messages[i]["role"] != "assistant"), -1) + 1
        try:
            outputs = self.processor.apply_chat_template(messages[:asked]) if any(loaded.media.values()) else {}
        except REJECTED as error:
            raise SampleError(f"{type(self.processor).__name__} rejects it: {error}") from error
        found = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
        ids = torch.tensor([self._tokens(messages, known["tools"])])
        return {**found, "input_ids": ids, "attention_mask": torch.ones_like(ids)}, ""

    def _tokens(self, messages: Sequence[Message], tools: Any) -> list[int]:
        """Tokens of messages, with that which ends the last turn."""
        if not messages:
            return []
        answered = messages[-1]["role"] == "assistant"
        try:
            ids = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=True, continue_final_message=answered
            )["input_ids"]
        # mistral-common has errors of its own.
        except Exception as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise SampleError(f"{type(self.tokenizer).__name__} rejects it: {error} (roles: {roles})") from error
        return [*ids, self.tokenizer.eos_token_id] if answered else list(ids)

    def _with_media(self, messages: Sequence[Message], media: Mapping[str, Sequence[Any]]) -> list[Message]:
        """The messages with the samples of their audio as WAV files."""
        rate = getattr(self.loader.component("audio"), "sampling_rate", None)
        files = [_wav(samples, rate) for samples in media["audio"]]
        found = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, list):
                content = [
                    {"type": "audio", "base64": files.pop(0)} if part.get("type") == "audio" else part
                    for part in content
                ]
            found.append({**message, "content": content})
        return found


def _wav(samples: Any, rate: Any) -> str:
    import soundfile

    stream = io.BytesIO()
    soundfile.write(stream, np.asarray(samples), rate, format="WAV", subtype="FLOAT")
    return base64.b64encode(stream.getvalue()).decode()
