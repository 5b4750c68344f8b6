"""Chat data: conversations rendered by a chat template, with labels for the tokens that are trained.

Which tokens are trained:

- A template with `{% generation %}` marks them itself.
- Otherwise an assistant turn is trained from the end of the generation prompt (what the model sees at inference) to
  the end of the turn. Both are found by rendering the conversation up to the turn, with the generation prompt, and up
  to and including it. White space after the token that ends the turn is not trained.
- A token is trained if one of its characters is in a trained part: the first token of an answer often holds the space
  before it, which the template may not mark.
- Where a template ends an answer without a special token (LLaVA, GLM), `append_eos` lets the model learn to stop: the
  end-of-sequence token is appended to a conversation that ends with an answer, and after an earlier answer it is the
  label of the token that follows, whose own place in the context does not change.

A template may render earlier turns differently when others follow: Qwen3's removes the reasoning of turns before the
last question. Such a conversation becomes several samples: a sample grows turn by turn as long as each rendering is a
prefix of the next, and the first turn that changes it starts a new sample. So each turn is trained exactly once, in the
context that the model sees at inference.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from opslot._base.errors import DataError
from opslot._base.labels import IGNORE_INDEX
from opslot.data.chat_columns import CHAT_COLUMNS, KNOWN, chat_columns, renames
from opslot.data.collation import LABELED
from opslot.data.content_forms import ContentForms
from opslot.data.encoder import SampleEncoder, SampleError, digest
from opslot.data.locations import Location
from opslot.data.messages import (
    Message,
    is_trained_turn,
    messages_of,
    messages_of_instruction,
    messages_of_texts,
    parsed,
)
from opslot.data.records import FileColumns, columns_in, lone_surrogate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Read where a file has them.
_OPTIONAL = ("system", "tools", "input", "history")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        spans: start and end of the trained parts, in characters; None if everything is trained.
        messages: those that the text renders; none without a template.
        stops: the last character of each answer after which the end-of-sequence token is predicted instead of the next
            turn, and the end of its turn.
    """

    text: str
    spans: list[tuple[int, int]] | None
    messages: Sequence[Message] = ()
    stops: Sequence[tuple[int, int]] = ()


class ChatEncoder(SampleEncoder):
    """Encodes conversations as tokens with labels (-100 for tokens that are not trained).

    Args:
        tokenizer: a fast tokenizer, with the chat template.
        max_seq_len, train_on, append_eos: as in `DataConfig`.
        plain: join prompt and completion as they are, without a template.
        options: of `SampleEncoder`.

    Raises:
        DataError: a tokenizer without character offsets, or without a chat template.
    """

    task = "sft"
    optional: tuple[str, ...] = _OPTIONAL
    needs_offsets = True

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_seq_len: int,
        *,
        train_on: str = "assistant",
        append_eos: bool = True,
        plain: bool = False,
        **options: str,
    ) -> None:
        super().__init__(tokenizer, max_seq_len, **options)
        # The tokenizers of mistral-common do not have the attribute.
        is_fast = getattr(tokenizer, "is_fast", False)
        if self.needs_offsets and not is_fast:
            raise DataError(
                f"task {self.task} needs the character offsets of a fast tokenizer",
                found=type(tokenizer).__name__,
                hint="use a folder with tokenizer.json",
            )
        self.train_on = train_on
        self.end = (tokenizer.eos_token or "") if append_eos else ""
        self.end_id = tokenizer.eos_token_id
        self.plain = plain or not tokenizer.chat_template
        self._in_form = ContentForms(self._apply_template)
        added = tokenizer.added_tokens_decoder.values() if is_fast else ()
        self._special = tuple(sorted({str(token) for token in added} | set(tokenizer.all_special_tokens)))

    def inspect(self, file: Path, format: str, problems: list[str]) -> None:
        found = columns_in(file, format, problems)
        if found is None:
            return
        if reason := _preferences(found):
            problems.append(
                f"{file}: preference data (it has {reason}), and task {self.task} has no chosen and rejected answers; "
                "rename the chosen ones to completion and remove the other columns, or train as examples/trl_dpo.py"
            )
            return
        form = chat_columns(found.names)
        if form is None:
            has = ", ".join(found.names) or "no columns (a text file?)"
            fix = f"; {rename}" if (rename := self.fix_of(found.names)) else ""
            problems.append(f"{file}: no chat data; it has {has}, and task {self.task} needs {KNOWN}{fix}")
        elif self.plain and (form[0] != "prompt" or not found.holds("prompt", str)):
            problems.append(
                f"{file}: {form[0]} needs a chat template, and the tokenizer has none (or data.chat_template is none); "
                "set data.chat_template to a file with one"
            )
        else:
            self.take(file, form, found.names)

    def take(self, file: Path, form: Sequence[str], names: Sequence[str]) -> None:
        """Set the columns to read of a file with these `names`; those in `form` hold its conversations."""
        self.columns[file] = [*form, *(name for name in self.optional if name in names)]

    def fix_of(self, names: Sequence[str]) -> str:
        """How to make conversations of columns that hold none; "" where unknown."""
        return renames(names)

    def identity(self) -> dict[str, Any]:
        template = "none" if self.plain else f"content {digest(repr(self.tokenizer.chat_template))}"
        return {
            **super().identity(),
            "task": "sft",
            "data.chat_template": template,
            "data.train_on": self.train_on,
            "data.append_eos": bool(self.end),
        }

    def samples(self, where: Location, record: Mapping[str, Any]) -> list[Any]:
        return self._render_record(*self._checked(where, record))

    def _checked(self, where: Location, record: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
        """The record, with an instruction or texts as messages, and the first column of its conversation."""
        columns = self.columns[where.file]
        form = next(form for form in CHAT_COLUMNS if form[0] == columns[0])
        missing = [name for name in form if record.get(name) is None]
        if missing:
            has = ", ".join(name for name, value in record.items() if value is not None) or "nothing"
            raise SampleError(f"no {' and no '.join(missing)}, which the file's first record has; it has {has}")
        if form[0] == "instruction":
            return {**record, "messages": messages_of_instruction(record)}, "messages"
        if form[0] == "texts":
            return {**record, "messages": messages_of_texts(record["texts"])}, "messages"
        return record, form[0]

    def _render_record(self, record: Mapping[str, Any], form: str) -> list[Rendered]:
        tools = parsed(record["tools"], "tools") if record.get("tools") else None
        if form == "prompt":
            samples = self._completion(record["prompt"], record["completion"], tools)
        else:
            messages = messages_of(record[form], form)
            if isinstance(record.get("system"), str) and record["system"] and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": record["system"]})
            samples = self._conversation(messages, tools, 0)
        for sample in samples:
            if problem := lone_surrogate(sample.text):
                raise SampleError(f"holds {problem}")
        return samples

    def _completion(self, prompt: Any, completion: Any, tools: Any) -> list[Rendered]:
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion.strip():
                raise SampleError("completion is empty")
            if self.plain:
                text = f"{prompt}{completion}{'' if completion.endswith(self.end) else self.end}"
                return [Rendered(text, None if self.train_on == "all" else [(len(prompt), len(text))])]
            prompt = [{"role": "user", "content": prompt}]
            completion = [{"role": "assistant", "content": completion}]
        # A string may be messages as JSON.
        if any(isinstance(value, str) and not value.lstrip().startswith("[") for value in (prompt, completion)):
            raise SampleError(
                "prompt and completion must both be strings, or both lists of messages, found "
                f"{type(prompt).__name__} and {type(completion).__name__}"
            )
        before, after = messages_of(prompt, "prompt"), messages_of(completion, "completion")
        return self._conversation(before + after, tools, len(before))

    def _conversation(self, messages: list[Message], tools: Any, first: int) -> list[Rendered]:
        """Samples of a conversation in which the assistant's turns from `first` on are trained."""
        return [self._ended(sample, tools) for sample in self._rendered_turns(messages, tools, first)]

    def _ended(self, sample: Rendered, tools: Any) -> Rendered:
        """The sample with the end-of-sequence token after answers that end with no special token."""
        text, spans = sample.text, sample.spans
        if not self.end or spans == []:
            return sample
        stops = self._stops(sample, tools)
        if sample.messages[-1]["role"] == "assistant" and not self._is_ended(text):
            ended = f"{text}{self.end}"
            return Rendered(ended, spans and [*spans, (len(text), len(ended))], sample.messages, stops)
        return Rendered(text, spans, sample.messages, stops)

    def _is_ended(self, text: str) -> bool:
        return text.rstrip().endswith(self._special)

    def end_of_answer(self) -> int | None:
        """The special token with which the template ends an answer; None without a template or such a token."""
        if self.plain or not getattr(self.tokenizer, "is_fast", False):
            return None
        talk = [{"role": role, "content": "some text"} for role in ("user", "assistant")]
        try:
            text = self._render(talk, None)[0].rstrip()
        except SampleError:
            return None
        token = max((token for token in self._special if text.endswith(token)), key=len, default=None)
        return None if token is None else self.tokenizer.convert_tokens_to_ids(token)

    def _stops(self, sample: Rendered, tools: Any) -> list[tuple[int, int]]:
        """Of each trained answer before the last turn that ends with no special token, its last character and end."""
        trained = {len(sample.text[:end].rstrip()) for _, end in sample.spans or ()}
        if all(self._is_ended(sample.text[:end]) for end in trained):
            return []
        found = []
        for number, message in enumerate(sample.messages[:-1], 1):
            if message["role"] != "assistant" or sample.messages[number]["role"] == "assistant":
                continue
            turn = self._render(list(sample.messages[:number]), tools)[0]
            length = len(turn.rstrip())
            if length in trained and sample.text.startswith(turn) and not self._is_ended(turn):
                found.append((length - 1, len(turn)))
        return found

    def _rendered_turns(self, messages: list[Message], tools: Any, first: int) -> list[Rendered]:
        full, marked = self._render(messages, tools)
        _check_tools(full, messages, tools)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self.train_on == "all":
            return [Rendered(full, None, messages)]
        turns = [i for i in answers if i >= first]
        if self.train_on == "last":
            turns = turns[-1:]
        turns = [i for i in turns if is_trained_turn(messages[i])]
        if not turns:
            return [Rendered(full, [], messages)]
        if marked is not None:
            if turns != answers:
                of_spans = answers
                if len(marked) != len(answers):
                    starts = [self._prompt_end(messages[:turn], tools, full) for turn in answers]
                    of_spans = [answers[max(bisect_right(starts, begin) - 1, 0)] for begin, _ in marked]
                marked = [span for span, turn in zip(marked, of_spans, strict=True) if turn in turns]
            return [Rendered(full, marked, messages)]
        samples: list[Rendered] = []
        for turn in turns:
            text = full if turn == len(messages) - 1 else self._render(messages[: turn + 1], tools)[0]
            spans = [(self._start_of_turn(messages[:turn], tools, text), self._end_of_turn(text))]
            if samples and text.startswith(samples[-1].text):
                spans = [*(samples.pop().spans or ()), *spans]
            samples.append(Rendered(text, spans, messages[: turn + 1]))
        if full.startswith(samples[-1].text):
            samples[-1] = Rendered(full, samples[-1].spans, messages)
        return samples

    def _prompt_end(self, before: list[Message], tools: Any, text: str) -> int:
        """Where the turns `before` an assistant's turn end in `text`."""
        return _common(text, self._render(before, tools, prompt=True)[0]) if before else 0

    def _start_of_turn(self, before: list[Message], tools: Any, text: str) -> int:
        """Where the model begins to write in `text`, which renders `before` and an assistant's turn."""
        try:
            prompt = self._render(before, tools, prompt=True)[0]
        except SampleError as error:
            if before:
                raise
            raise SampleError(f"the first turn is the assistant's, and nothing can precede it: {error}") from error
        start = _common(text, prompt)
        # A generation prompt may open the reasoning, which a turn without reasoning does not have.
        if start < len(prompt) and not text[:start].startswith(self._render(before, tools)[0] if before else ""):
            raise SampleError(
                "the chat template renders the turns before an assistant's turn differently with and without it, so "
                "the trained part is unknown; mark it with {% generation %} in a template file (data.chat_template)"
            )
        return start

    def _end_of_turn(self, text: str) -> int:
        stripped = text.rstrip()
        return len(stripped) if stripped.endswith(self._special) else len(text)

    def _render(
        self, messages: list[Message], tools: Any, *, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """The text of `messages`, and the parts that the template marks with `{% generation %}`, if it does."""
        return self._apply_template(self._in_form(messages), tools, prompt=prompt)

    def _apply_template(
        self, messages: list[Message], tools: Any, *, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]] | None]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            template = self.tokenizer.get_chat_template(None, tools)
            marks = _GENERATION.search(template) is not None
            special: dict[str, Any] = self.tokenizer.special_tokens_map
            rendered: Any = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **special,
            )
        except (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise SampleError(f"the chat template rejects it: {error} (roles: {roles})") from error
        (text,), spans = rendered
        return text, list(spans[0]) if marks else None

    def size_of(self, sample: Any) -> int:
        return len(sample.text)

    def documents(self, batch: list[tuple[Location, Any]], problems: list[str], counts: Counter[str]) -> Iterator[Any]:
        encoded = self.tokenizer(
            [sample.text for _, sample in batch],
            add_special_tokens=self.plain,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        for (where, sample), ids, offsets in zip(batch, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            labeled = np.empty(len(ids), LABELED)
            labeled["token"] = ids
            labeled["label"] = self.labels(ids, sample.spans, sample.stops, offsets)
            kept = self.limited(where, labeled, problems, counts)
            if self.is_trained(kept, counts):
                yield kept

    def labels(
        self,
        ids: Sequence[int],
        spans: list[tuple[int, int]] | None,
        stops: Sequence[tuple[int, int]],
        offsets: list[tuple[int, int]],
    ) -> np.ndarray:
        """Labels [S] of tokens [S] whose characters are at `offsets`; spans and stops as in `Rendered`."""
        labels = np.where(trained_tokens(spans, offsets), ids, IGNORE_INDEX)
        starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
        for last, end in stops:
            following = np.flatnonzero(ends > end)[:1]
            # A token that also holds the end of the answer leaves no place between them.
            labels[following[starts[following] > last]] = self.end_id
        return labels

    def is_trained(self, tokens: np.ndarray | None, counts: Counter[str]) -> bool:
        """Whether a token is trained; counts samples without. The first token of a sample is never predicted."""
        if tokens is None:
            return False
        if (tokens["label"][1:] != IGNORE_INDEX).any():
            return True
        counts["without a trained token"] += 1
        return False


def _check_tools(text: str, messages: Sequence[Message], tools: Any) -> None:
    """Raise SampleError where a conversation as text lacks its tools or their calls: many templates ignore them."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    for what, items in {"tools": tools, "tool_calls": calls}.items():
        for item in items if isinstance(items, list) else ():
            function = item.get("function", item) if isinstance(item, Mapping) else {}
            name = function.get("name") if isinstance(function, Mapping) else None
            if isinstance(name, str) and name not in text:
                raise SampleError(
                    f"the chat template does not render its {what} ({name}); set data.chat_template to one that does, "
                    "or leave them out"
                )


def _preferences(found: FileColumns) -> str:
    """The columns that hold preferences (DPO, KTO), whose rejected answers must not be trained; "" without them."""
    names = set(found.names)
    if {"chosen", "rejected"} <= names:
        return "chosen and rejected"
    is_flag = {"prompt", "completion", "label"} <= names and found.holds("label", bool)
    return "label, true or false" if is_flag else ""


def _common(first: str, second: str) -> int:
    """Length of the common prefix."""
    if first.startswith(second):
        return len(second)
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def trained_tokens(spans: list[tuple[int, int]] | None, offsets: list[tuple[int, int]]) -> np.ndarray:
    """Whether each token has a character in one of `spans`."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    if spans is None:
        return np.ones(len(starts), dtype=bool)
    # Special tokens that the tokenizer adds have no characters.
    ends = np.maximum(ends, starts + 1)
    trained = np.zeros(len(starts), dtype=bool)
    for begin, end in spans:
        trained |= (starts < end) & (ends > begin)
    return trained
