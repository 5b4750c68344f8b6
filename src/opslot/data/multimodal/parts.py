"""Images, videos and audio of a conversation, given in content parts or in columns beside the messages."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from opslot.data.encoder import SampleError
from opslot.data.messages import Message, messages_of, text_of
from opslot.data.multimodal.media import KINDS, SOURCE_KEYS

# Columns that hold the media of all messages in their order, as LLaMA-Factory, ms-swift and TRL read them.
COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
_TAG = re.compile(r"<(image|video|audio)>")
# As the first Qwen-VL names an image in a text.
_PATH_TAG = re.compile(r"<img>[^<>\n]+</img>")
# Whose turns the columns of texts are.
_SPEAKER = {"prompt": "user", "completion": "assistant"}
# Settings of a part that qwen-vl-utils or Transformers apply, and the field for all samples.
_SETTINGS = {
    **dict.fromkeys(("min_pixels", "max_pixels", "resized_height", "resized_width", "total_pixels"), "data.max_pixels"),
    **dict.fromkeys(("nframes", "num_frames", "min_frames", "max_frames"), "data.max_frames"),
    "video_fps": "data.max_fps",
    **dict.fromkeys(("video_start", "video_end"), "none, store clips as files"),
}


def separate_media(record: Mapping[str, Any], form: str) -> tuple[dict[str, Any], list[tuple[str, Any]], bool]:
    """The record with parts {"type": "image"} for media, (kind, source) of each in order, and whether the messages name
    none of the media of columns.

    A part is {"type": "image", "image": SOURCE}, {"type": "image", "path": ...} (or bytes, base64, array), {"type":
    "image_url", "image_url": {"url": ...}} and the like, or {"type": "image"} for the next of the column `images`, with
    "index" for the one with that number. In a text, <image>, <video> and <audio> also stand for the next of a column,
    if the record has that column, in the turns of `_Column.roles`; in other turns they are text, and so are all of them
    in text parts beside parts {"type": "image"} of the column. Where the messages have none of these, the media of the
    columns are at the start of the first user's turn.

    Args:
        form: the first column of the conversation.

    Raises:
        SampleError: a malformed message, a part without a source, a setting that is not applied, or a column with more
            or fewer media than the messages use.
    """
    columns = ("prompt", "completion") if form == "prompt" else (form,)
    given = {column: _messages(record[column], column) for column in columns}
    turns = [message for messages in given.values() for message in messages]
    queues = {kind: _Column(kind, found, turns) for kind in KINDS if (found := _column(record, kind)) is not None}
    media: list[tuple[str, Any]] = []
    changed = {name: [_of_message(message, queues, media) for message in messages] for name, messages in given.items()}
    is_unnamed = not media and any(queues.values())
    if is_unnamed:
        media = _put_first(changed[columns[0]], queues)
    left = [f"{len(queue)} more of {kind}{queue.uncounted()}" for kind, queue in queues.items() if queue]
    if left:
        raise SampleError(
            f"the columns of media have {' and '.join(left)} than the messages use; add <image>, <video> or <audio> "
            'to the text, or parts {"type": "image"}'
        )
    for kind, source in media:
        if isinstance(source, Mapping):
            _reject_settings(f"the source of {kind}", source)
    # Texts without media stay as they are: they need no chat template.
    kept = {name for name in columns if not media and _is_text(record[name], name)}
    return {**record, **{name: messages for name, messages in changed.items() if name not in kept}}, media, is_unnamed


def _is_text(value: Any, column: str) -> bool:
    """Whether a column is the text of a turn, and not messages, which may be JSON text."""
    return column in _SPEAKER and isinstance(value, str) and not value.lstrip().startswith("[")


def _messages(value: Any, column: str) -> list[Message]:
    return [{"role": _SPEAKER[column], "content": value}] if _is_text(value, column) else messages_of(value, column)


def _parts(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """The parts of all messages whose contents are lists."""
    contents = (message.get("content") for message in messages)
    return [part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping)]


def _put_first(messages: list[Message], queues: dict[str, _Column]) -> list[tuple[str, Any]]:
    """The media of all columns, which are put at the start of the first user's turn, as TRL and ms-swift put them; none
    without a user's turn."""
    first = next((message for message in messages if message["role"] == "user"), None)
    if first is None:
        return []
    content = first.get("content")
    text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    media = [(kind, queue.take()) for kind, queue in queues.items() for _ in range(len(queue))]
    first["content"] = [*({"type": kind} for kind, _ in media), *text]
    return media


def has_unused_tag(messages: Sequence[Message]) -> bool:
    """Whether <image>, <video>, <audio> or <img>PATH</img> is text in a user's turn."""
    users = [message for message in messages if message.get("role") == "user"]
    texts = [*(message.get("content") for message in users), *(part.get("text") for part in _parts(users))]
    return any(isinstance(text, str) and (_TAG.search(text) or _PATH_TAG.search(text)) for text in texts)


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
        tags: in texts, by the role of their turn.
        roles: in whose turns tags stand for media. That is in all turns where there are as many tags as media, else in
            all but the assistant's where those have as many, else in the user's. Tags in answers alone are text.
    """

    def __init__(self, kind: str, sources: list[Any], messages: Sequence[Message]) -> None:
        self.kind = kind
        self.sources = sources
        self.unused = [*range(len(sources))]
        given = [{key: value for key, value in part.items() if value is not None} for part in _parts(messages)]
        parts = [part for part in given if part.get("type") == kind and _source(part, kind) is None]
        self.has_parts = bool(parts)
        self.tags: Counter[str] = Counter()
        for message in messages:
            found = [message.get("content"), *(part.get("text") for part in _parts([message]) if not parts)]
            texts = (text for text in found if isinstance(text, str))
            self.tags[message["role"]] += sum(tag == kind for text in texts for tag in _TAG.findall(text))
        named = {part["index"] for part in parts if "index" in part}
        self.roles = self._roles(len(sources) - len(named) - sum("index" not in part for part in parts))

    def _roles(self, count: int) -> set[str]:
        """Roles in whose turns tags stand for `count` media."""
        every = {*self.tags}
        asking = every - {"assistant"}
        if self.has_parts or any(self.tags[role] for role in asking):
            for roles in (every, asking):
                if sum(self.tags[role] for role in roles) == count:
                    return roles
        return {"user"}

    def uncounted(self) -> str:
        """For an error, the number of tags that are text because of their turns; "" for none."""
        count = sum(number for role, number in self.tags.items() if role not in self.roles)
        return f" (without {count} <{self.kind}> in other turns than the user's, which do not fit)" if count else ""

    def __len__(self) -> int:
        return len(self.unused)

    def take(self, index: Any = None) -> Any:
        """The source with that number, from 0; None for the first that is unused."""
        number = self.unused[0] if index is None else index
        if not isinstance(number, int) or not 0 <= number < len(self.sources):
            raise SampleError(f"index {index!r} is not one of the {len(self.sources)} media of the column")
        if number in self.unused:
            self.unused.remove(number)
        return self.sources[number]


def _of_message(message: Message, queues: dict[str, _Column], media: list[tuple[str, Any]]) -> Message:
    content = message.get("content")
    tagged = {kind: queue for kind, queue in queues.items() if message["role"] in queue.roles}
    if isinstance(content, str):
        return {**message, "content": _of_text(content, tagged, media)}
    if not isinstance(content, list):
        return message
    tagged = {kind: queue for kind, queue in tagged.items() if not queue.has_parts}
    parts = []
    for part in content:
        found = _of_part(part, queues, media)
        if found["type"] == "text":
            text = _of_text(found["text"], tagged, media)
            parts += text if isinstance(text, list) else [found]
        else:
            parts.append(found)
    return {**message, "content": parts}


def _of_text(text: str, queues: dict[str, _Column], media: list[tuple[str, Any]]) -> Any:
    """The text itself, or its parts where tags refer to the media of columns."""
    parts: list[dict[str, Any]] = []
    start = 0
    for tag in _TAG.finditer(text):
        kind = tag[1]
        if kind not in queues:
            continue
        if not queues[kind]:
            raise SampleError(f"the messages have more {tag[0]} than the column {kind}s")
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
        raise SampleError(f"a part of a message must be an object with type, found {part!r}"[:200])
    known = {key: value for key, value in part.items() if value is not None}
    if "sample_fps" in known:
        # The rate of a list of frames in qwen-vl-utils.
        known["fps"] = known.pop("sample_fps")
    kind = _kind(known)
    if other := next((name for name in ("text", *KINDS) if name != kind and known.get(name)), None):
        raise SampleError(f"a part of type {kind} has {other} too; make it two parts")
    if kind == "text":
        return {"type": "text", "text": text_of(known)}
    source = _source(known, kind)
    if source is None:
        if kind not in queues or not (queues[kind] or "index" in known):
            raise SampleError(
                f'a part of type {kind} has no source; it has {", ".join(known)}. Give it as "{kind}", path, bytes or '
                f"base64, or in a column {kind}s"
            )
        source = queues[kind].take(known.get("index"))
    _reject_settings(f"a part of type {kind}", known)
    media.append((kind, source))
    return {"type": kind}


def _reject_settings(what: str, given: Mapping[str, Any]) -> None:
    if setting := next((name for name in _SETTINGS if given.get(name) is not None), None):
        raise SampleError(f"{what} has {setting}, which is not applied; remove it (for all: {_SETTINGS[setting]})")


def _kind(part: Mapping[str, Any]) -> str:
    given = str(part.get("type") or next((key for key in part if key.split("_")[0] in (*KINDS, "text")), ""))
    kind = given.removeprefix("input_").removeprefix("output_").removesuffix("_url")
    if kind not in (*KINDS, "text"):
        raise SampleError(f"unknown part type {given!r}; expected text, {', '.join(KINDS)}")
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
    return dict(part) if any(part.get(name) is not None for name in SOURCE_KEYS) else None


def _key_of(value: Any) -> str:
    if isinstance(value, str):
        return "path"
    return "bytes" if isinstance(value, bytes) else "array"


def media_of(messages: Sequence[Message], media: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The first of `media`, those of the given messages."""
    return media[: sum(part.get("type") in KINDS for part in _parts(messages))]
