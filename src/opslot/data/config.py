"""The `data` section of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass
class DataConfig:
    """The training data, and how it becomes samples.

    Args:
        train_path: files, globs or folders that `datasets` saved, one or a list. Known extensions are .jsonl, .ndjson,
            .jsonlines, .jl and .json (one JSON object per line; .json also an array of objects), these with .gz or
            .zst, .parquet, .arrow, .txt, .md and .tar (WebDataset). Of a saved DatasetDict, the split "train" is read.
            hf://datasets/ORG/NAME[@REVISION]/GLOB are files of the Hugging Face hub, which are downloaded.
        train: instead of `train_path`, a mixture: a list of {path, weight}; each sample comes from a data set that is
            drawn with a probability proportional to its weight (default 1).
        eval_path: as `train_path`, for evaluation; default `eval_fraction` of the training documents is held out. Of a
            saved DatasetDict, the split "validation", else "test", is read.
        eval_fraction: fraction of the documents held out if `train.eval_steps` is set and `eval_path` is not; above
            256 MiB of text, the fraction of a random 256 MiB of it.
        format: format of all files; auto decides by extension and rejects unknown ones.
        text_field: field (jsonl) or column (parquet, Arrow) that holds the text.
        chat_template: file with the chat template for tasks sft and vlm, which is also saved with the model; default
            the tokenizer's. "none" joins prompt and completion without a template.
        train_on: what tasks sft and vlm train: all turns of the assistant (or the completion), its last turn only, or
            all tokens.
        long_samples: what tasks sft, vlm and classification do with a sample of more than `max_seq_len` tokens: an
            error, cut its end, or leave it out. Both are counted. A sample whose images, video or audio would be cut is
            left out.
        on_bad_sample: what they do with a malformed sample, such as a line that is not JSON, or a sample that the
            template rejects or whose image does not decode: an error, or leave it out and count it.
        label_field: field of the labels for task classification: a label, or a list of one for each word in `tokens`;
            default the first that exists of label, labels, ner_tags and tags.
        label_names: names of the labels in the order of their numbers; default those of the data set or the
            checkpoint, else the sorted values in the training data.
        max_pixels: task vlm scales larger images and video frames down to at most this many pixels before the
            processor, which has its own limits; default no further limit.
        max_frames: frames that task vlm samples uniformly from a longer video.
        max_fps: frames per second that task vlm samples at most from a video; default all, up to max_frames. Most
            checkpoints were trained at 2.
        use_audio_in_video: read the audio tracks of videos too (omni models).
        media_dir: folder where relative paths of images, videos and audio start in task vlm, also one of a data set of
            the hub, hf://datasets/ORG/NAME[@REVISION][/FOLDER]; default the folder of the file that names them.
        sample_by: what a document is in a plain text file: the file (above 4 MiB it is split at ends of lines), a line,
            or a paragraph (up to a blank line).
        max_seq_len: tokens per sample; default 2048, or what the model, its tokenizer or `max_tokens_per_batch` allow
            where that is less.
        max_tokens_per_batch: maximum number of tokens in a micro batch. With it, documents are packed whole, up to
            max_seq_len tokens each, without padding; a step has at most `train.global_batch_size` times max_seq_len
            tokens, balanced across ranks by estimated FLOPs.
        packing: pack several documents into each sample; they do not attend to each other. Off: one document per
            sample, padded. Tasks sft and vlm pack whole conversations, as with max_tokens_per_batch; task
            classification never packs.
        shuffle: visit documents in a random order that depends on `train.seed` and the epoch only: shards of 4 MiB in
            random order, with a shuffle buffer of up to 64 shards.
        append_eos: append the tokenizer's end-of-sequence token to each document; for tasks sft and vlm, to completions
            without a chat template, and to conversations whose template ends an answer without a special token.
        split_special_tokens: tokenize special tokens that occur in the text, such as <|endoftext|>, as plain text. Off:
            they become the special token, as in Transformers.
        num_workers: processes that prepare batches ahead of training, and as many that tokenize ahead of it; 0 does
            both in the training process. Default 2 for each process that trains on a GPU, 8 for task vlm, or as many as
            there are CPU cores for; 0 on a CPU.
        cache_dir: folder for tokenized text, shared by runs and processes; default the cache of Hugging Face datasets.
        allow_changes: resume although the text, the tokenizer or a data setting has changed since the checkpoint;
            training continues at the same sample number of the new data, so samples may repeat or be missed.
    """

    train_path: str | list[str] = ""
    train: list[dict[str, Any]] | None = None
    eval_path: str | list[str] | None = None
    eval_fraction: float = 0.02
    format: Literal["auto", "text", "jsonl", "parquet", "arrow", "tar"] = "auto"
    text_field: str = "text"
    chat_template: str | None = None
    train_on: Literal["assistant", "last", "all"] = "assistant"
    long_samples: Literal["error", "truncate", "skip"] = "error"
    on_bad_sample: Literal["error", "skip"] = "error"
    label_field: str | None = None
    label_names: list[str] | None = None
    max_pixels: int | None = None
    max_frames: int = 64
    max_fps: float | None = None
    use_audio_in_video: bool = False
    media_dir: str | None = None
    sample_by: Literal["document", "line", "paragraph"] = "document"
    max_seq_len: int | None = None
    max_tokens_per_batch: int | None = None
    packing: bool = True
    shuffle: bool = True
    append_eos: bool = True
    split_special_tokens: bool = False
    num_workers: int | None = None
    cache_dir: str | None = None
    allow_changes: bool = False

    @property
    def sample_length(self) -> int:
        """`max_seq_len`, which a run sets where it was left out."""
        assert self.max_seq_len is not None, "see `set_sample_length`"
        return self.max_seq_len
