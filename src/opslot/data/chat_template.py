"""The chat template of a run: the tokenizer's, or one in a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from opslot._base.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_chat_template(tokenizer: PreTrainedTokenizerBase, source: str | None) -> None:
    """Give the tokenizer the template in the file `source`; None and "none" leave it as it is.

    Raises:
        DataError: the file cannot be read, or holds no template or several; the template is not a Jinja template, or
            renders no messages; or the tokenizer has several without a default.
    """
    if source == "none":
        return
    if source is None:
        templates = getattr(tokenizer, "chat_template", None)
        if isinstance(templates, dict) and not templates.keys() & {"default", "tool_use"}:
            raise DataError(
                "the tokenizer has several chat templates, and none is the default",
                found=", ".join(templates),
                hint="write one of them to a file, and set data.chat_template to it",
            )
        for text in templates.values() if isinstance(templates, dict) else [templates or ""]:
            _check_template(text, "the tokenizer's chat template", "set data.chat_template to a file with another")
        return
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(
            f"data.chat_template: {source} cannot be read", found=str(error), hint="set it to a Jinja template file"
        ) from error
    text = _in_json(text, source)
    name = f"data.chat_template: {source}"
    _check_template(text, name, "fix it there")
    if "messages" not in text:
        raise DataError(f"{name} renders no messages", hint="set it to a file with a Jinja template of conversations")
    tokenizer.chat_template = text


def _in_json(text: str, source: str) -> str:
    """The template in the text of a file, which is JSON in a chat_template.json of Transformers' processors."""
    if not text.lstrip().startswith('{"'):
        return text
    try:
        found = json.loads(text)["chat_template"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return text
    if not isinstance(found, str):
        raise DataError(
            f"data.chat_template: {source} has several chat templates",
            hint="write one of them to a file, and set data.chat_template to it",
        )
    return found


def _check_template(text: str, name: str, hint: str) -> None:
    import jinja2

    try:
        # Block tags that Jinja itself does not know are checked when the first conversation is rendered.
        jinja2.Environment().parse(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text))
    except jinja2.TemplateSyntaxError as error:
        if "unknown tag" not in str(error):
            raise DataError(
                f"{name} is not a Jinja template", found=f"line {error.lineno}: {error}", hint=hint
            ) from error
