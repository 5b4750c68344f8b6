"""`evaluation.prompts`: a text, or a mapping of a text and the files of images, videos and audio before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# An entry of `evaluation.prompts`.
PromptValue = str | Mapping[str, Any]

_KINDS = {"images": "image", "videos": "video", "audios": "audio"}
# How a prompt with media looks, for errors.
MEDIA_PROMPT = '{text: "How many circles?", images: [shapes.png]}'


@dataclass(frozen=True)
class Prompt:
    """A prompt of the evaluation.

    Attributes:
        media: kind ("image", "video" or "audio") and path of each file before the text.
    """

    text: str
    media: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """The text, and the files beside it."""
        return f"{self.text!r}{''.join(f' ({path})' for _, path in self.media)}"


def prompt_of(value: PromptValue) -> Prompt:
    """The prompt of an entry without a `prompt_problem`."""
    if isinstance(value, str):
        return Prompt(value)
    return Prompt(value["text"], tuple((kind, path) for name, kind in _KINDS.items() for path in value.get(name) or ()))


def prompt_problem(value: Any) -> str | None:
    """What is wrong with an entry of `evaluation.prompts`."""
    if isinstance(value, str):
        return None
    if not isinstance(value, Mapping) or not isinstance(value.get("text"), str):
        return f"is neither a text nor a mapping with text, such as {MEDIA_PROMPT}"
    if unknown := [str(name) for name in value if name not in ("text", *_KINDS)]:
        return f"has {', '.join(unknown)}; beside text, known are {', '.join(_KINDS)}"
    for name in _KINDS:
        paths = value.get(name)
        if paths is not None and not (isinstance(paths, list) and all(isinstance(path, str) for path in paths)):
            return f"has {name} that is not a list of paths"
    return None
