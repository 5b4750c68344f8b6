"""`opslot data preview`: what a configuration trains on."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opslot.data.preview import Part
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
    from opslot._base.labels import IGNORE_INDEX
    from opslot.data.preview import documents_of, parts_of

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
                parts = parts_of(data.tokenizer, ids, labels)
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


def _marked(part: Part, tokens: bool, color: bool) -> str:
    text = " ".join(part.tokens) if tokens else part.text
    if part.labels:
        text += "=" + ",".join(map(str, part.labels))
    if not part.trained:
        return f" {text} " if tokens else text
    return f"{_TRAINED}{text}{_END}" if color else f"[[{text}]]"
