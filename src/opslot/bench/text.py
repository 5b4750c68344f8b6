"""Batches of real text that every machine has: the sources of Python's standard library."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from opslot._base.errors import ConfigError


def text_batches(steps: int, batch: int, length: int, vocab_size: int) -> Any:
    """Token ids, int32 [steps, batch, length]: consecutive text, in a byte-level BPE learned from it.

    Raises:
        ConfigError: the model's vocabulary is smaller than the tokenizer's, or the text is too short.
    """
    import numpy

    from opslot.data.python_sources import VOCABULARY, train_tokenizer, write_sources
    from opslot.data.tokenizer import load_tokenizer

    if vocab_size < VOCABULARY:
        raise ConfigError(
            f"--curve requires a model with a vocabulary of {VOCABULARY} or more",
            found=f"vocab_size is {vocab_size}",
            hint="leave out --curve, or name a model with more tokens",
        )
    needed = steps * batch * length
    with tempfile.TemporaryDirectory() as folder:
        texts = [text for text, _ in write_sources(Path(folder) / "data")]
        train_tokenizer(texts, Path(folder) / "tokenizer")
        tokenizer = load_tokenizer(Path(folder) / "tokenizer")
        ids: list[int] = []
        for text in texts:
            ids += [*tokenizer(text, verbose=False)["input_ids"], tokenizer.eos_token_id]
            if len(ids) >= needed:
                break
    if len(ids) < needed:
        raise ConfigError(
            f"--curve requires {needed:,} tokens ({steps} x {batch} x {length})",
            found=f"{len(ids):,} in the sources of the standard library",
            hint="use fewer steps or smaller batches",
        )
    return numpy.array(ids[:needed], dtype=numpy.int32).reshape(steps, batch, length)
