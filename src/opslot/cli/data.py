"""`opslot data preview`: what a configuration trains on."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from opslot._base.labels import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from opslot.trainer.config import RunConfig

_TRAINED, _END = "\033[1;32m", "\033[0m"


def run(options: argparse.Namespace) -> int:
    """Print the first documents that `opslot train` with the rest of the arguments would train on."""
    from opslot.trainer.parse import load_config

    config = load_config(options.rest)
    color = {"auto": sys.stdout.isatty(), "always": True, "never": False}[options.color]
    with open_data(config) as data:
        _print_preview(config, data, options.samples, options.tokens, color)
    return 0


@contextlib.contextmanager
def open_data(config: RunConfig) -> Iterator[Any]:
    """The data sets of a run, as `RunData`, without its model."""
    from opslot.models import load_config
    from opslot.trainer.run_data import RunData, open_tokenizer, set_sample_length
    from opslot.trainer.validate import validate_data

    inputs = validate_data(config)
    model_config = load_config(inputs.config_path, trust_remote_code=config.model.trust_remote_code)
    tokenizer = open_tokenizer(config, inputs, model_config)
    set_sample_length(config.data, model_config, tokenizer)
    with contextlib.closing(RunData(config, inputs, tokenizer, model_config)) as data:
        data.start_tokenizing()
        yield data


def _print_preview(config: RunConfig, data: Any, samples: int, tokens: bool, color: bool) -> None:
    trained = total = shown = 0
    lengths: list[list[int]] = []
    batches, times = [], []
    for batch in itertools.islice(data.micro_batches(), max(8, samples)):
        batches.append(batch)
        times.append(time.perf_counter())
    for number, batch in enumerate(batches):
        documents = documents_of(batch)
        lengths.append([len(ids) for ids, _ in documents])
        for ids, labels in documents:
            trained += int((labels != IGNORE_INDEX).sum())
            total += len(ids)
            if shown < samples:
                shown += 1
                parts = _parts_of(data.tokenizer, ids, labels)
                print(f"sample {shown} (micro batch {number + 1}, {len(ids)} tokens)")
                print("  " + "".join(_marked(part, tokens, color) for part in parts).replace("\n", "\n  "))
                print()
    print(f"data: {data.describe()}")
    share = trained / max(1, total)
    print(f"trained: {trained:,} of the {total:,} tokens ({share:.1%}) in the first {len(lengths)} micro batches")
    # The first micro batch waits for the tokenization of its shard and for the start of the workers.
    if len(times) > 1 and times[-1] > times[0]:
        later, seconds = lengths[1:], times[-1] - times[0]
        counts = sum(map(len, later)) / seconds, sum(map(sum, later)) / seconds
        print(f"loader: {counts[0]:,.0f} samples/s, {counts[1]:,.0f} tokens/s with {data.num_workers} workers")
    limit = f"at most {data.max_tokens}" if data.max_tokens else f"{config.data.sample_length} per sample with padding"
    for number, own in enumerate(lengths[:samples], 1):
        listed = ", ".join(map(str, own[:12])) + (", ..." if len(own) > 12 else "")
        print(f"micro batch {number}: {sum(own)} tokens ({limit}) in {len(own)} documents of {listed}")


@dataclass(frozen=True)
class _Part:
    """Consecutive tokens that are all trained, with labels of one kind, or all not.

    Attributes:
        labels: of the tokens where they are not the tokens themselves, as in classification.
    """

    text: str
    tokens: list[str]
    trained: bool
    labels: list[int]


def _parts_of(tokenizer: PreTrainedTokenizerBase, input_ids: Any, labels: Any) -> list[_Part]:
    """The parts of one document, from its int64 [S] tokens and labels as a trainer gives them to the model."""
    ids, targets = np.asarray(input_ids), np.asarray(labels)
    trained = targets != IGNORE_INDEX
    # After an answer, the label can be the end-of-sequence token instead of the token that follows.
    changes = np.flatnonzero(np.diff(trained) | np.diff(trained & (targets != ids))) + 1
    bounds = [0, *changes.tolist(), len(ids)]
    parts = []
    for start, stop in itertools.pairwise(bounds):
        part, own = ids[start:stop].tolist(), targets[start:stop].tolist()
        parts.append(
            _Part(
                str(tokenizer.decode(part)),
                [str(token) for token in tokenizer.convert_ids_to_tokens(part)],
                bool(trained[start]),
                own if trained[start] and own != part else [],
            )
        )
    return parts


def documents_of(batch: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Tokens and labels, int64 [S], of each document in a micro batch, without padding."""
    ids, labels = batch["input_ids"], batch["labels"]
    if "cu_seq_lens_q" in batch:
        offsets = batch["cu_seq_lens_q"].tolist()
        flat_ids, flat_labels = ids.flatten(), labels.flatten()
        found = [(flat_ids[a:b], flat_labels[a:b]) for a, b in itertools.pairwise(offsets)]
        # Padding is a document without labels at the end of a sample.
        return [(tokens, own) for tokens, own in found if len(tokens) == 1 or (own != IGNORE_INDEX).any()]
    mask = batch.get("attention_mask")
    lengths = [ids.shape[1]] * len(ids) if mask is None else mask.sum(1).tolist()
    if labels.ndim == 1:
        # One label per text, which its last token predicts.
        spread = ids.new_full(ids.shape, IGNORE_INDEX)
        for row, length, label in zip(spread, lengths, labels, strict=True):
            row[length - 1] = label
        labels = spread
    return [(tokens[:n], own[:n]) for tokens, own, n in zip(ids, labels, lengths, strict=True)]


def _marked(part: _Part, tokens: bool, color: bool) -> str:
    text = " ".join(part.tokens) if tokens else part.text
    if part.labels:
        text += "=" + ",".join(map(str, part.labels))
    if not part.trained:
        return f" {text} " if tokens else text
    return f"{_TRAINED}{text}{_END}" if color else f"[[{text}]]"
