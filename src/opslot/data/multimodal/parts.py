"""Images, videos and audio of a conversation, given in content parts or in columns beside the messages."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from opslot.data.multimodal.media import KINDS, MediaError

# Columns that hold the media of all messages in their order, as LLaMA-Factory, ms-swift and TRL read them.
COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
_TAG = re.compile(r"<(image|video|audio)>")
# Whose turns the columns of texts are.
_SPEAKER = {"prompt": "user", "completion": "assistant"}
_SOURCES = ("path", "url", "bytes", "base64", "array", "frames", "file")
# Settings of a part that qwen-vl-utils applies, and the field for all samples.
_SETTINGS = {
    **dict.fromkeys(("min_pixels", "max_pixels", "resized_height", "resized_width", "total_pixels"), "data.max_pixels"),
    **dict.fromkeys(("nframes", "min_frames", "max_frames"), "data.max_frames"),
    **dict.fromkeys(("video_start", "video_end"), "none, store clips as files"),
}


def separate_media(record: Mapping[str, Any], form: str) -> tuple[dict[str, Any], list[tuple[str, Any]], bool]:
    """The record with parts {"type": "image"} for media, (kind, source) of each in order, and whether the messages name
    none of the media of columns.

    A part is {"type": "image", "image": SOURCE}, {"type": "image", "path": ...} (or bytes, base64, array), {"type":
    "image_url", "image_url": {"url": ...}} and the like, or {"type": "image"} for the next of the column `images`, with
    "index" for the one with that number. In a text, <image>, <video> and <audio> also stand for the next of a column,
    if the record has that column; in other turns than a user's, those that are left over are text, and so are all of
    them in text parts beside parts {"type": "image"} of the column. Where the messages have none of these, the media of
    the columns are at the start of the first user's turn.

    Args:
        form: the first column of the conversation.

    Raises:
        MediaError: a part without a source, or a column with more or fewer media than the messages use.
    """
    queues = {kind: _Column(given) for kind in KINDS if (given := _column(record, kind)) is not None}
    media: list[tuple[str, Any]] = []
    columns = ("prompt", "completion") if form == "prompt" else (form,)
    changed = {**record, **{column: _turns(record[column], column) for column in columns if column in record}}
    lists = [changed[column] for column in columns if isinstance(changed.get(column), list)]
    for kind in _kinds_of_parts(lists) & queues.keys():
        queues[kind].has_parts = True
    for column in columns:
        value = changed.get(column)
        if isinstance(value, str) and column in _SPEAKER:
            parts = _of_text(value, queues, media, column == "prompt")
            if parts != value:
                changed[column] = [{"role": _SPEAKER[column], "content": parts}]
        elif isinstance(value, list):
            changed[column] = [_of_message(message, queues, media) for message in value]
    is_unnamed = not media and any(queues.values())
    if is_unnamed:
        media = _put_first(changed, columns, queues)
    if form == "prompt" and isinstance(changed.get("prompt"), list) and isinstance(changed.get("completion"), str):
        changed["completion"] = [{"role": "assistant", "content": changed["completion"]}]
    left = [f"{len(queue)} more of {kind}" for kind, queue in queues.items() if queue]
    if left:
        raise MediaError(
            f"the columns of media have {' and '.join(left)} than the messages use; add <image>, <video> or <audio> "
            'to the text, or parts {"type": "image"}'
        )
    return changed, media, is_unnamed


def _turns(value: Any, column: str) -> Any:
    """Messages that are JSON text as a list; other values as they are."""
    if not isinstance(value, str) or column in _SPEAKER:
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _kinds_of_parts(lists: list[list[Any]]) -> set[str]:
    """Kinds of media of which a message has a part without a source, which stands for one of a column."""
    contents = [_content(message)[1] for messages in lists for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping)]
    given = ({key: value for key, value in part.items() if value is not None} for part in parts)
    return {kind for part in given if (kind := part.get("type")) in KINDS and _source(part, kind) is None}


def _put_first(changed: dict[str, Any], columns: Sequence[str], queues: dict[str, _Column]) -> list[tuple[str, Any]]:
    """The media of all columns, which are put at the start of the first user's turn, as TRL and ms-swift put them; none
    without a user's turn."""
    first = changed.get(columns[0])
    if isinstance(first, str) and columns[0] in _SPEAKER:
        first = [{"role": _SPEAKER[columns[0]], "content": first}]
    turns = first if isinstance(first, list) else []
    number = next((i for i, message in enumerate(turns) if isinstance(message, Mapping) and _is_by_user(message)), None)
    if number is None:
        return []
    key, content = _content(turns[number])
    text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    media = [(kind, queue.take()) for kind, queue in queues.items() for _ in range(len(queue))]
    parts = [{"type": kind} for kind, _ in media]
    changed[columns[0]] = [*turns[:number], {**turns[number], key: [*parts, *text]}, *turns[number + 1 :]]
    return media


def has_unused_tag(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether <image>, <video> or <audio> is text in a user's turn."""
    contents = [message.get("content") for message in messages if message.get("role") == "user"]
    parts = (part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping))
    texts = [*contents, *(part.get("text") for part in parts)]
    return any(isinstance(text, str) and _TAG.search(text) for text in texts)


def _column(record: Mapping[str, Any], kind: str) -> list[Any] | None:
    for name in (f"{kind}s", kind):
        value = record.get(name)
        if isinstance(value, str) and value.startswith("["):
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        if value is not None:
            several = isinstance(value, list) and (name == f"{kind}s" or _holds_sources(value, kind))
            # Text beside images may have null, or no path.
            return [item for item in (value if several else [value]) if item is not None and item != ""]
    return None


def _holds_sources(value: list[Any], kind: str) -> bool:
    """Whether a list is of several images or audios, and not one as an array; a list of images is one video."""
    return kind != "video" and all(isinstance(item, str | bytes | Mapping) for item in value)


class _Column:
    """The media of a column, which messages use one after the other, or by number.

    Attributes:
        has_parts: parts of messages stand for them, so that tags in other parts are text.
    """

    def __init__(self, sources: list[Any]) -> None:
        self.sources = sources
        self.has_parts = False
        self.unused = [*range(len(sources))]

    def __len__(self) -> int:
        return len(self.unused)

    def take(self, index: Any = None) -> Any:
        """The source with that number, from 0; None for the first that is unused."""
        number = self.unused[0] if index is None else index
        if not isinstance(number, int) or not 0 <= number < len(self.sources):
            raise MediaError(f"index {index!r} is not one of the {len(self.sources)} media of the column")
        if number in self.unused:
            self.unused.remove(number)
        return self.sources[number]


def _of_message(message: Any, queues: dict[str, _Column], media: list[tuple[str, Any]]) -> Any:
    if not isinstance(message, Mapping):
        return message
    key, content = _content(message)
    by_user = _is_by_user(message)
    if isinstance(content, str):
        return {**message, key: _of_text(content, queues, media, by_user)}
    if not isinstance(content, list):
        return dict(message)
    parts = []
    for part in content:
        found = _of_part(part, queues, media)
        if found["type"] == "text":
            tagged = {kind: queue for kind, queue in queues.items() if not queue.has_parts}
            text = _of_text(found["text"], tagged, media, by_user)
            parts += text if isinstance(text, list) else [found]
        else:
            parts.append(found)
    return {**message, key: parts}


def _content(message: Mapping[str, Any]) -> tuple[str, Any]:
    """The key and the content of a message."""
    key = "content" if message.get("content") is not None else "value"
    return key, message.get(key)


def _is_by_user(message: Mapping[str, Any]) -> bool:
    return (message.get("role") or message.get("from")) in ("user", "human")


def _of_text(text: str, queues: dict[str, _Column], media: list[tuple[str, Any]], by_user: bool) -> Any:
    """The text itself, or its parts where tags refer to the media of columns."""
    parts: list[dict[str, Any]] = []
    start = 0
    for tag in _TAG.finditer(text):
        kind = tag[1]
        if not queues.get(kind) and not (by_user and kind in queues):
            continue
        if not queues[kind]:
            raise MediaError(f"the messages have more {tag[0]} than the column {kind}s")
        if tag.start() > start:
            parts.append({"type": "text", "text": text[start : tag.start()]})
        parts.append({"type": kind})
        media.append((kind, queues[kind].take()))
        start = tag.end()
    if not parts:
        return text
    return [*parts, {"type": "text", "text": text[start:]}] if start < len(text) else parts


def _of_part(part: Any, queues: dict[str, _Column], media: list[tuple[str, Any]]) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise MediaError(f"a part of a message must be an object with type, found {part!r}"[:200])
    known = {key: value for key, value in part.items() if value is not None}
    if "sample_fps" in known:
        # The rate of a list of frames in qwen-vl-utils.
        known["fps"] = known.pop("sample_fps")
    kind = _kind(known)
    if other := next((name for name in ("text", *KINDS) if name != kind and known.get(name)), None):
        raise MediaError(f"a part of type {kind} has {other} too; make it two parts")
    if kind == "text":
        if "text" not in known:
            raise MediaError(f"a part of type text has no text; it has {', '.join(known) or 'nothing'}"[:200])
        text = known["text"]
        if not isinstance(text, str):
            raise MediaError(f"the text of a part must be a string, found {text!r}"[:200])
        return {"type": "text", "text": text}
    if setting := next((name for name in _SETTINGS if name in known), None):
        raise MediaError(
            f"a part of type {kind} has {setting}, which is not applied; remove it (for all: {_SETTINGS[setting]})"
        )
    source = _source(known, kind)
    if source is None:
        if kind not in queues or not (queues[kind] or "index" in known):
            raise MediaError(
                f'a part of type {kind} has no source; it has {", ".join(known)}. Give it as "{kind}", path, bytes or '
                f"base64, or in a column {kind}s"
            )
        source = queues[kind].take(known.get("index"))
    media.append((kind, source))
    return {"type": kind}


def _kind(part: Mapping[str, Any]) -> str:
    given = str(part.get("type") or next((key for key in part if key.split("_")[0] in (*KINDS, "text")), ""))
    kind = given.removeprefix("input_").removeprefix("output_").removesuffix("_url")
    if kind not in (*KINDS, "text"):
        raise MediaError(f"unknown part type {given!r}; expected text, {', '.join(KINDS)}")
    return kind


def _source(part: Mapping[str, Any], kind: str) -> Any:
    for key in (kind, f"{kind}_url", f"input_{kind}", "source"):
        value = part.get(key)
        if isinstance(value, Mapping) and "data" in value:
            return {"base64": value["data"]}
        if value is not None:
            # Settings beside the source, such as fps.
            extra = {name: part[name] for name in ("fps", "sampling_rate") if name in part}
            if not extra:
                return value
            return {**value, **extra} if isinstance(value, Mapping) else {_key_of(value): value, **extra}
    return dict(part) if any(part.get(name) is not None for name in _SOURCES) else None


def _key_of(value: Any) -> str:
    if isinstance(value, str):
        return "path"
    return "bytes" if isinstance(value, bytes) else "array"


def media_of(messages: Sequence[Mapping[str, Any]], media: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The first of `media`, those of the given messages."""
    contents = [message.get("content") for message in messages]
    count = sum(
        part.get("type") in KINDS
        for content in contents
        if isinstance(content, list)
        for part in content
        if isinstance(part, Mapping)
    )
    return media[:count]
