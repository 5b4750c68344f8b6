"""Messages with role and content, from the known forms of records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from opslot.data.encoder import SampleError

# Roles of ShareGPT.
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
    # Its text is the call, or a list of them, as JSON.
    "function_call": "assistant",
}
_TURNS = ("user", "assistant")

Message = dict[str, Any]


def messages_of_instruction(record: Mapping[str, Any]) -> list[Message]:
    """The messages of Alpaca's columns: a question is the instruction and, on a new line, its input.

    Raises:
        SampleError: a column with another type.
    """
    history = record.get("history") or []
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in history):
        raise SampleError(f"history must be a list of [question, answer], found {_shown(history)}")
    turns = [(role, f"history[{i}]", text) for i, pair in enumerate(history) for role, text in zip(_TURNS, pair)]
    instruction, given = record["instruction"], record.get("input") or ""
    for name, text in (("instruction", instruction), ("input", given)):
        if not isinstance(text, str):
            raise SampleError(f"{name} must be a string, found {_shown(text)}")
    question = "\n".join(part for part in (instruction, given) if part)
    turns += [("user", "instruction", question), ("assistant", "output", record["output"])]
    return [_message({"role": role, "content": text}, name) for role, name, text in turns]


def messages_of_texts(texts: Any) -> list[Message]:
    """The messages of FineVision's and The Cauldron's column: a list of {user, assistant}.

    Raises:
        SampleError: a column with another type.
    """
    texts = parsed(texts, "texts")
    if not isinstance(texts, list) or not texts or not all(isinstance(pair, Mapping) for pair in texts):
        raise SampleError(f"texts must be a list of objects with user and assistant, found {_shown(texts)}")
    turns = [(role, f"texts[{i}].{role}", pair.get(role)) for i, pair in enumerate(texts) for role in _TURNS]
    return [_message({"role": role, "content": text}, name) for role, name, text in turns]


def messages_of(value: Any, column: str) -> list[Message]:
    """Messages with role and content, from any of the known forms.

    Raises:
        SampleError: a message is malformed.
    """
    if isinstance(value, str):
        value = parsed(value, column)
    if isinstance(value, Mapping):
        # An old form of `datasets`: one list per field.
        value = [dict(zip(value, row, strict=False)) for row in zip(*value.values(), strict=False)]
    if value == []:
        raise SampleError(f"{column} is empty")
    if not isinstance(value, list):
        raise SampleError(f"{column} must be a list of messages, found {_shown(value)}")
    return [_message(message, f"{column}[{number}]") for number, message in enumerate(value)]


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, Mapping):
        raise SampleError(f"{name} must be an object with role and content, found {_shown(value)}")
    message = {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if "from" in message and "role" not in message:
        speaker = str(message.pop("from")).lower()
        role = _ROLES.get(speaker)
        if role is None:
            raise SampleError(f"{name}: unknown speaker {value['from']!r}; expected one of {', '.join(_ROLES)}")
        message["role"] = role
        if "value" in message:
            message["content"] = message.pop("value")
        if speaker == "function_call":
            calls = parsed(message.pop("content", None), name)
            calls = calls if isinstance(calls, list) else [calls]
            message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise SampleError(f"{name} has no role; it has {', '.join(map(str, message)) or 'nothing'}")
    if not isinstance(content, str | list | None):
        raise SampleError(f"{name}: content must be a string, found {_shown(content)}")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping) and part.get("type") == "text":
            text_of(part, f"{name}: ")
    if message.get("weight", 1) not in (0, 1):
        raise SampleError(f"{name}: weight must be 0 or 1, found {_shown(message['weight'])}")
    if message.get("train", True) not in (False, True):
        raise SampleError(f"{name}: train must be true or false, found {_shown(message['train'])}")
    calls = message.get("tool_calls")
    if calls is not None:
        calls = parsed(calls, f"{name}.tool_calls")
        if not isinstance(calls, list):
            raise SampleError(f"{name}.tool_calls must be a list, found {_shown(calls)}")
        message["tool_calls"] = [_tool_call(call, f"{name}.tool_calls") for call in calls]
    elif content is None or (role == "assistant" and _is_empty(content)):
        raise SampleError(f"{name}: the {role}'s turn is empty")
    return message


def is_trained_turn(message: Message) -> bool:
    """Whether an assistant's turn is trained: OpenAI's `weight: 0` and axolotl's `train: false` exclude it."""
    return bool(message.get("weight", 1)) and bool(message.get("train", True))


def text_of(part: Mapping[str, Any], where: str = "") -> str:
    """The text of a part of type text.

    Args:
        where: before the text of an error.

    Raises:
        SampleError: no text, or another type.
    """
    if part.get("text") is None:
        raise SampleError(f"{where}a part of type text has no text; it has {', '.join(map(str, part))}"[:200])
    if not isinstance(part["text"], str):
        raise SampleError(f"{where}the text of a part must be a string, found {_shown(part['text'])}")
    return part["text"]


def _is_empty(content: str | list[Any]) -> bool:
    """Whether content is white space, or a list of parts with white space alone."""
    if isinstance(content, str):
        return not content.strip()
    return all(isinstance(part, Mapping) and not str(part.get("text", part)).strip() for part in content)


def _tool_call(value: Any, name: str) -> Any:
    """A tool call whose arguments are an object, as templates expect them, not JSON text as in OpenAI's API."""
    if not isinstance(value, Mapping):
        raise SampleError(f"{name} must hold objects, found {_shown(value)}")
    call = dict(value)
    if isinstance(call.get("function"), Mapping):
        call["function"] = _tool_call(call["function"], name)
    if isinstance(call.get("arguments"), str):
        call["arguments"] = parsed(call["arguments"], f"{name}: arguments")
    return call


def parsed(value: Any, name: str) -> Any:
    """A value that may be JSON text.

    Raises:
        SampleError: text that is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise SampleError(f"{name} is not JSON: {error}") from error


def _without_nulls(value: Any) -> Any:
    """Arrow adds the missing fields of structures as nulls."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if not isinstance(value, list):
        return value
    first: Any = value
    while isinstance(first, list) and first:
        first = first[0]
    # An image or audio as an array has millions of numbers.
    return value if isinstance(first, int | float) else [_without_nulls(item) for item in value]


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return f"a {type(value).__name__} ({text[:40]}{'...' if len(text) > 40 else ''})"
