"""The `data` section of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class DataConfig:
    """The training text, and how it becomes samples.

    Args:
        train_path: files or globs, one or a list. Known extensions are .jsonl, .ndjson, .jsonlines, .jl and .json (one
            JSON object per line), .parquet, .txt and .md.
        eval_path: the same for evaluation; default `eval_fraction` of the training documents is held out.
        eval_fraction: fraction of the documents held out if `train.eval_steps` is set and `eval_path` is not; above
            256 MiB of text, the fraction of a random 256 MiB of it.
        format: format of all files; auto decides by extension and rejects unknown ones.
        text_field: field (jsonl) or column (parquet) that holds the text.
        sample_by: what a document is in a plain text file: the file (above 4 MiB it is split at ends of lines), a line,
            or a paragraph (up to a blank line).
        max_seq_len: tokens per sample.
        max_tokens_per_batch: maximum number of tokens in a micro batch. With it, documents are packed whole, up to
            max_seq_len tokens each, without padding; a step has at most `train.global_batch_size` times max_seq_len
            tokens, balanced across ranks by estimated FLOPs.
        packing: pack several documents into each sample; they do not attend to each other. Off: one document per
            sample, padded.
        shuffle: visit documents in a random order that depends on `train.seed` and the epoch only: shards of 4 MiB in
            random order, with a shuffle buffer of up to 64 shards.
        append_eos: append the tokenizer's end-of-sequence token to each document.
        split_special_tokens: tokenize special tokens that occur in the text, such as <|endoftext|>, as plain text. Off:
            they become the special token, as in Transformers.
        num_workers: processes that prepare batches ahead of training, and as many that tokenize ahead of it; 0 does
            both in the training process.
        cache_dir: folder for tokenized text, shared by runs and processes; default the cache of Hugging Face datasets.
        allow_changes: resume although the text, the tokenizer or a data setting has changed since the checkpoint;
            training continues at the same sample number of the new data, so samples may repeat or be missed.
    """

    train_path: str | list[str] = ""
    eval_path: str | list[str] | None = None
    eval_fraction: float = 0.02
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    text_field: str = "text"
    sample_by: Literal["document", "line", "paragraph"] = "document"
    max_seq_len: int = 2048
    max_tokens_per_batch: int | None = None
    packing: bool = True
    shuffle: bool = True
    append_eos: bool = True
    split_special_tokens: bool = False
    num_workers: int = 0
    cache_dir: str | None = None
    allow_changes: bool = False
