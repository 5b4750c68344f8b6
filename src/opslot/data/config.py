"""The `data` section of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class DataConfig:
    """Where the text is and how it becomes rows of tokens.

    Args:
        train_path: files or globs, one or a list. `.jsonl`, `.ndjson` and `.json` hold one object a line,
            `.parquet` holds columns; every other file is plain text.
        eval_path: the same for evaluation; without it, `eval_fraction` of the training documents is held out.
        eval_fraction: share of the documents held out when `train.eval_steps` is set and `eval_path` is not; of more
            than 256 MiB of text, that share of 256 MiB drawn from all over it.
        text_field: the field, or column, that holds the text in jsonl and parquet files.
        sample_by: what one document is in a plain text file: the file (one above 4 MiB is cut into documents of that
            size at ends of lines), a line, or a paragraph (up to a blank line).
        max_seq_len: tokens in a row.
        max_tokens_per_batch: tokens that one process, or `train.sp_size` together, run at a time. With it, documents
            stay whole up to max_seq_len and are not padded: a step takes as many as fit in `train.global_batch_size`
            times max_seq_len tokens, and deals them out so that all processes compute equally long.
        packing: fill each row with as many documents as it holds; they do not see each other. Off: one document
            a row, padded.
        shuffle: draw documents and rows in an order that depends on `train.seed` and the epoch alone: 4 MiB blocks of
            text in a random order, and all documents of up to 64 of them at random.
        append_eos: end each document with the tokenizer's end-of-sequence token.
        num_workers: processes that assemble batches beside the training one, and as many that tokenize ahead of it
            until all text is; 0 does both where and when they are needed.
        cache_dir: folder for tokenized text, which later runs and all processes of this one share; default the cache of
            Hugging Face datasets.
    """

    train_path: str | list[str] = ""
    eval_path: str | list[str] | None = None
    eval_fraction: float = 0.02
    text_field: str = "text"
    sample_by: Literal["document", "line", "paragraph"] = "document"
    max_seq_len: int = 2048
    max_tokens_per_batch: int | None = None
    packing: bool = True
    shuffle: bool = True
    append_eos: bool = True
    num_workers: int = 0
    cache_dir: str | None = None
