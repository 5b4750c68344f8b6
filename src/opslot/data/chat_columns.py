"""The columns of chat data, and how to rename those that other data sets have."""

from __future__ import annotations

from collections.abc import Collection

CHAT_COLUMNS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"), ("texts",))
KNOWN = "messages, conversations, prompt and completion, instruction and output, or texts"
# Columns of other names that hold the same.
_MESSAGES = ("conversation", "message", "dialogue", "dialog", "chat", "turns")
_QUESTIONS = ("prompt", "query", "question", "input", "problem")
_ANSWERS = ("completion", "response", "output", "answer", "solution")
_SYSTEM = ("system", "system_prompt")


def chat_columns(names: Collection[str]) -> tuple[str, ...] | None:
    """Those of `names` that hold the conversations; None without any."""
    return next((form for form in CHAT_COLUMNS if set(form) <= set(names)), None)


def renames(names: Collection[str]) -> str:
    """How to rename columns so that they hold conversations, such as "rename query to prompt"; "" where unknown."""
    if found := next((name for name in _MESSAGES if name in names), None):
        return f"rename {found} to messages"
    answer = next((name for name in _ANSWERS if name in names), None)
    if answer is None:
        return ""
    if "instruction" in names:
        pairs = {"instruction": "instruction", answer: "output"}
        # Dolly's name of what Alpaca calls input.
        pairs |= {"context": "input"} if "context" in names else {}
    else:
        question = next((name for name in _QUESTIONS if name in names), None)
        if question is None:
            return ""
        pairs = {question: "prompt", answer: "completion"}
        if system := next((name for name in _SYSTEM if name in names), None):
            # A prompt with a completion has no system column.
            pairs = {question: "instruction", answer: "output", system: "system"}
    return "rename " + " and ".join(f"{old} to {new}" for old, new in pairs.items() if old != new)


def missing_text(text_field: str, names: Collection[str], kind: str) -> str:
    """The error for data without the field of texts.

    Args:
        names: what the data has.
        kind: "field" or "column".
    """
    has = ", ".join(map(str, names)) or "none"
    if chat_columns(names) is not None:
        fix = "For chats, set task: sft"
    else:
        fix = f"Set data.text_field to the {kind} that holds the text"
        if rename := renames(names):
            fix += f"; for chats, set task: sft and {rename}"
    return f"no {kind} {text_field!r}; it has {has}. {fix}"
