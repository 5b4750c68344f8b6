"""Text that every machine has: the sources of Python's standard library, and a tokenizer trained on them."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from opslot._base.errors import ConfigError

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"

# Not training text: tests, tables, generated data, installed packages.
_EXCLUDED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "pydoc_data",
    "encodings",
    "ensurepip",
}
_HELD_OUT = {"json", "bisect.py", "contextlib.py", "shelve.py", "textwrap.py"}


def write_sources(folder: Path) -> list[tuple[str, bool]]:
    """Write the standard library as train.jsonl and eval.jsonl; returns (text, held out) of each module."""
    root = Path(sysconfig.get_path("stdlib"))
    folder.mkdir(parents=True, exist_ok=True)
    documents: list[tuple[str, bool]] = []
    with (folder / "train.jsonl").open("w") as train, (folder / "eval.jsonl").open("w") as held_out:
        for file in sorted(root.rglob("*.py")):
            parts = file.relative_to(root).parts
            if _EXCLUDED & set(parts):
                continue
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if text.strip():
                hidden = parts[0] in _HELD_OUT
                line = json.dumps({"path": "/".join(parts), "text": text})
                (held_out if hidden else train).write(line + "\n")
                documents.append((text, hidden))
    if not documents:
        raise ConfigError(
            f"no Python sources in {root}", hint="use a Python whose standard library is not in a zip file"
        )
    return documents


def train_tokenizer(
    texts: list[str],
    folder: Path,
    vocabulary: int = VOCABULARY,
    special_tokens: Sequence[str] = (),
    end: str = END_OF_TEXT,
    chat_template: str | None = None,
) -> None:
    """Train a byte-level BPE tokenizer and save it as Transformers reads it.

    Args:
        vocabulary: number of tokens.
        special_tokens: besides END_OF_TEXT, which also pads.
        end: the end-of-sequence token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    saved.chat_template = chat_template
    saved.save_pretrained(folder)
