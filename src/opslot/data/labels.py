"""Labelled texts for classification: one label per text, or one per word."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from opslot._base.errors import DataError, list_problems
from opslot._base.labels import IGNORE_INDEX
from opslot.data.collation import LABELED
from opslot.data.encoder import SampleEncoder, SampleError, digest
from opslot.data.locations import Location
from opslot.data.records import columns_in, lone_surrogate, read_records, split_into_shards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LABELS = ("label", "labels", "ner_tags", "tags")
_WORDS = ("tokens", "words")
_MOST_LABELS = 10_000


class LabelEncoder(SampleEncoder):
    """Encodes labelled texts: the label of a text is on its last token, the label of a word on its first token.

    Texts are tokenized as the tokenizer does by default.

    Args:
        text_field, label_field, max_seq_len: as in `DataConfig`.
        options: of `SampleEncoder`.

    Attributes:
        per_token: whether each word has a label; known once a file is inspected.
        names: names of the labels in the order of their numbers; set it before encoding.
        class_names: names that a data set's own description gives.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_seq_len: int,
        *,
        text_field: str = "text",
        label_field: str | None = None,
        **options: str,
    ) -> None:
        super().__init__(tokenizer, max_seq_len, **options)
        self.text_field = text_field
        self.label_field = label_field
        self.per_token: bool | None = None
        self.names: list[str] = []
        self.class_names: list[str] = []

    def inspect(self, file: Path, format: str, problems: list[str]) -> None:
        found = columns_in(file, format, problems)
        if found is None:
            return
        wanted = (self.label_field,) if self.label_field else _LABELS
        label = next((name for name in wanted if name in found.names), None)
        has = ", ".join(found.names) or "no columns (a text file?)"
        if label is None:
            hint = "" if self.label_field else "; set data.label_field to the column that holds the labels"
            problems.append(f"{file}: no column {' or '.join(wanted)}; it has {has}{hint}")
            return
        per_token = found.holds(label, list)
        texts = _WORDS if per_token else (self.text_field,)
        text = next((name for name in texts if name in found.names), None)
        if text is None:
            problems.append(f"{file}: no column {' or '.join(texts)} beside {label}; it has {has}; set data.text_field")
        elif self.per_token not in (None, per_token):
            kind = "lists" if per_token else "single labels"
            problems.append(f"{file}: {label} holds {kind}, unlike other files; train on files of one kind")
        else:
            self.per_token = per_token
            self.class_names = self.class_names or _class_names(found.schema, label)
            self.columns[file] = [text, label]

    def identity(self) -> dict[str, Any]:
        return {
            **super().identity(),
            "task": "classification",
            "data.label_field": f"{self.label_field}, {len(self.names)} labels, {digest(repr(self.names))}",
            "data.text_field": self.text_field,
        }

    def samples(self, where: Location, record: Mapping[str, Any]) -> list[Any]:
        """The text or words of a record, and its labels' numbers."""
        text_field, label_field = self.columns[where.file]
        missing = [name for name in (text_field, label_field) if record.get(name) is None]
        if missing:
            has = ", ".join(str(name) for name, value in record.items() if value is not None) or "nothing"
            raise SampleError(f"no {' and no '.join(missing)}; it has {has}")
        text, label = record[text_field], record[label_field]
        if not self.per_token:
            _check_text(text, text_field)
            if not text.strip():
                raise SampleError(f"{text_field} is empty")
            return [(text, [self._number(label, label_field)])]
        if not isinstance(text, list) or not isinstance(label, list) or len(text) != len(label) or not text:
            raise SampleError(f"{text_field} and {label_field} must be lists of the same length, not empty")
        for number, word in enumerate(text):
            _check_text(word, f"{text_field}[{number}]")
        return [(text, [name if name == IGNORE_INDEX else self._number(name, label_field) for name in label])]

    def _number(self, label: Any, field: str) -> int:
        if isinstance(label, str) and label in self.names:
            return self.names.index(label)
        if isinstance(label, int) and 0 <= label < len(self.names):
            return int(label)
        shown = ", ".join(self.names[:8]) + (", ..." if len(self.names) > 8 else "")
        raise SampleError(f"{field} is {label!r}, which is not one of the {len(self.names)} labels ({shown})")

    def size_of(self, sample: Any) -> int:
        text, _ = sample
        return len(text) if isinstance(text, str) else sum(map(len, text))

    def documents(self, batch: list[tuple[Location, Any]], problems: list[str], counts: Counter[str]) -> Iterator[Any]:
        encoded = self.tokenizer(
            [text for _, (text, _) in batch],
            is_split_into_words=bool(self.per_token),
            return_attention_mask=False,
            verbose=False,
        )
        for number, (where, (_, labels)) in enumerate(batch):
            ids = self.limited(where, encoded["input_ids"][number], problems, counts)
            if ids is None:
                continue
            if not ids:
                counts["without a token"] += 1
                continue
            tokens = np.empty(len(ids), LABELED)
            tokens["token"] = ids
            tokens["label"] = IGNORE_INDEX
            if self.per_token:
                words = encoded.word_ids(number)[: len(ids)]
                firsts = [i for i, word in enumerate(words) if word is not None and (i == 0 or word != words[i - 1])]
                tokens["label"][firsts] = [labels[words[i]] for i in firsts]
            else:
                tokens["label"][-1] = labels[0]
            yield tokens


def _check_text(text: Any, name: str) -> None:
    if not isinstance(text, str):
        raise SampleError(f"{name} is not a text")
    if lone := lone_surrogate(text):
        raise SampleError(f"{name} holds {lone}")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def find_label_names(encoder: LabelEncoder, files: Sequence[Path], format: str) -> list[str]:
    """Names of the labels in `files`, which are read once: sorted strings, or LABEL_0 to the largest number.

    Raises:
        DataError: labels that are neither strings nor numbers from 0, or a file that cannot be read.
    """
    problems: list[str] = []
    columns = {file: encoder.columns[file][1:] for file in files}
    found_labels: set[str | int] = set()
    malformed: list[str] | None = [] if encoder.on_bad_sample == "skip" else None
    for shard in split_into_shards(files, columns, 64 << 20, problems, format):
        for where, record in read_records(shard, columns, problems, malformed):
            value = record.get(columns[where.file][0])
            found_labels.update(label for label in _listed(value) if isinstance(label, str | int))
        if problems:
            raise DataError(
                list_problems("the data cannot be read", problems),
                hint="fix it, or leave malformed samples out with data.on_bad_sample: skip",
            )
    names = {label for label in found_labels if isinstance(label, str)}
    largest = max((int(label) for label in found_labels if isinstance(label, int)), default=-1)
    count = len(names) or largest + 1
    if count < 1 or count > _MOST_LABELS or (names and largest >= 0):
        wrong = f"{count:,} different labels" if count > 0 else "neither strings nor integers from 0"
        wrong = "strings and integers" if names and largest >= 0 else wrong
        raise DataError("the labels cannot be classes", found=wrong, hint="set data.label_field to a column of labels")
    return sorted(names) if names else [f"LABEL_{number}" for number in range(count)]


def collate_labeled(samples: list[dict[str, Any]], per_token: bool) -> dict[str, Any]:
    """A micro batch of labelled texts, padded on the right to the longest one.

    Returns:
        input_ids, position_ids, attention_mask: int64 [B, S].
        labels: int64 [B, S] with -100 where there is none; without `per_token`, int64 [B].
    """
    longest = max(len(sample["input_ids"]) - sample["padding"] for sample in samples)
    input_ids = torch.stack([sample["input_ids"][:longest] for sample in samples])
    labels = torch.stack([sample["labels"][:longest] for sample in samples])
    lengths = torch.tensor([len(sample["input_ids"]) - sample["padding"] for sample in samples])
    positions = torch.arange(longest).expand_as(input_ids).contiguous()
    return {
        "input_ids": input_ids,
        "labels": labels if per_token else labels.gather(1, lengths[:, None] - 1)[:, 0],
        "position_ids": positions,
        "attention_mask": (positions < lengths[:, None]).long(),
    }


def _class_names(schema: Any, label: str) -> list[str]:
    """Names from the description that `datasets` stores in a table's schema."""
    try:
        description = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label]
    except (AttributeError, LookupError, ValueError, TypeError):
        return []
    while isinstance(description, Mapping) and "names" not in description:
        description = description.get("feature")
    names = description.get("names") if isinstance(description, Mapping) else None
    return [str(name) for name in names] if isinstance(names, list) else []
