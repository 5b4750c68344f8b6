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
_CAPTIONS = ("text", "caption", "captions", "alt_text", "txt", "description")
# Columns that often hold the paths of media, by the column that is read.
_MEDIA = {
    "images": ("image_path", "image_paths", "image_file", "image_url", "image_urls", "img", "img_path", "file_name"),
    "videos": ("video_path", "video_paths", "video_file", "video_url"),
    "audios": ("audio_path", "audio_paths", "audio_file", "audio_url", "wav"),
}


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


def media_renames(names: Collection[str]) -> str:
    """How to rename columns that seem to hold media; "" without any."""
    found = {name: column for column, others in _MEDIA.items() for name in others if name in names}
    return "rename " + " and ".join(f"{old} to {new}" for old, new in found.items()) if found else ""


def caption_fix(names: Collection[str], media: Collection[str]) -> str:
    """How to train on texts beside media, which answer no question; "" without both.

    Args:
        media: the columns of media that are read.
    """
    caption = next((name for name in _CAPTIONS if name in names), None)
    if caption is None or not (set(media) & set(names) or media_renames(names)):
        return ""
    return (
        f"make {caption} an answer: a column messages with a user's turn, such as 'Describe the image.', and "
        f"{caption} as the assistant's turn"
    )


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
