"""Whether a chat template takes the content of a message as a string or as a list of parts.

Many templates of multimodal checkpoints read parts alone and render nothing of a string. Many templates of text models
print a list of parts as Python does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opslot.data.encoder import SampleError
from opslot.data.messages import Message

_ROLES = ("system", "user", "assistant", "tool")
_CALL: Message = {"id": "opslot000", "type": "function", "function": {"name": "opslot", "arguments": {}}}
_TEXT = "some text"


class ContentForms:
    """Gives the contents of messages the form that a template takes; which one is found by rendering a message.

    Args:
        render: the text of messages, first of what it returns for them and for tools; raises an error where the
            template rejects them.
    """

    def __init__(self, render: Callable[[list[Message], Any], tuple[str, Any]]) -> None:
        self.render = render
        self._taken: dict[tuple[str, bool], bool] = {}

    def __call__(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with contents that the template takes, unchanged where it takes neither form.

        Raises:
            SampleError: an image, video or audio in a message of which the template takes text alone.
        """
        return [self._in_form(message) for message in messages]

    def _in_form(self, message: Message) -> Message:
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES or not isinstance(content, str | list) or not content:
            return message
        as_parts = isinstance(content, list)
        if self._takes(role, as_parts) or not self._takes(role, not as_parts):
            return message
        if isinstance(content, str):
            return {**message, "content": [{"type": "text", "text": content}]}
        kinds = [part.get("type") if isinstance(part, Mapping) else "text" for part in content]
        if other := next((kind for kind in kinds if kind != "text"), None):
            raise SampleError(
                f"the chat template takes only text in the {role}'s turns, and there is {other}; set "
                "data.chat_template to the template of a model that takes it"
            )
        texts = [part if isinstance(part, str) else part.get("text", "") for part in content]
        return {**message, "content": "".join(texts)}

    def _takes(self, role: str, as_parts: bool) -> bool:
        if (role, as_parts) not in self._taken:
            self._taken[role, as_parts] = self._renders(role, as_parts)
        return self._taken[role, as_parts]

    def _renders(self, role: str, as_parts: bool) -> bool:
        message: Message = {"role": role, "content": [{"type": "text", "text": _TEXT}] if as_parts else _TEXT}
        for other in ("", [{"type": "text", "text": ""}]):
            user = {"role": "user", "content": other}
            call: Message = {"role": "assistant", "content": other, "tool_calls": [_CALL]}
            answer = {**message, "name": "opslot", "tool_call_id": _CALL["id"]}
            messages: list[Message] = {
                "system": [message, user],
                "user": [message],
                "assistant": [user, message],
                "tool": [user, call, answer],
            }[role]
            try:
                text, _ = self.render(messages, None)
            # A template may raise anything.
            except Exception:
                continue
            if _TEXT in text and "'type'" not in text and '"type"' not in text:
                return True
        return False
