"""`RunData`: the data sets of a run, from its configuration and a tokenizer; needs no model."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from opslot._base.errors import ConfigError, DataError, list_problems
from opslot.data.chat import ChatEncoder
from opslot.data.chat_template import load_chat_template
from opslot.data.corpus import TokenCorpus, open_corpus
from opslot.data.encoder import Encoder, TextEncoder
from opslot.data.labels import LabelEncoder, collate_labeled, find_label_names
from opslot.data.loader import EvaluationLoader, SampleLoader, TokenLoader
from opslot.data.mixture import MixedDataset
from opslot.data.multimodal.collation import MultimodalCollator
from opslot.data.multimodal.encoder_cost import AudioRows
from opslot.data.multimodal.loading import MediaLoader
from opslot.data.multimodal.media import Limits
from opslot.data.multimodal.samples import MultimodalEncoder
from opslot.data.multimodal.token_templates import encoder_class
from opslot.data.packing import Documents, PackedDataset
from opslot.data.split import split_documents
from opslot.data.tokenizer import load_tokenizer
from opslot.models._build import config_error
from opslot.models._multimodal.placeholders import PlaceholderCheck
from opslot.models.flop_modules import ModuleReader
from opslot.trainer.config import RunConfig
from opslot.trainer.processors import load_processor, rope_positions
from opslot.trainer.setup import input_dtype, num_workers
from opslot.trainer.validate import RunInputs, micro_batch_size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from opslot.data.config import DataConfig

# Tokens per sample, where the model takes as many.
_USUAL_LENGTH = 2048
CHAT_TASKS = ("sft", "vlm")
# Up to this many bytes of text are tokenized before the first step (seconds), so that the steps can be counted.
_TOKENIZED_AT_START = 16 << 20
# The same for samples with media, which are decoded then, and the size of their shards. A path counts as text, an image
# in the record as its bytes.
_MEDIA_AT_START = 1 << 20
_MEDIA_SHARD_BYTES = 128 << 10


class RunData:
    """Corpora, training set and evaluation sets.

    Attributes:
        train_set: the training samples; whole documents where `max_tokens` is set.
        eval_sets: one for each evaluated data set; empty without evaluation.
        max_tokens: maximum tokens in a micro batch of whole documents; None for samples of one size.
        num_workers: `data.num_workers`, or its default here.
    """

    def __init__(
        self,
        config: RunConfig,
        inputs: RunInputs,
        tokenizer: PreTrainedTokenizerBase,
        model_config: PreTrainedConfig,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.num_workers = num_workers(config)
        self.max_tokens = config.data.max_tokens_per_batch
        if config.task in CHAT_TASKS and config.data.packing and self.max_tokens is None:
            self.max_tokens = micro_batch_size(config.train) * config.data.sample_length
        self.encoder = make_encoder(config, inputs, tokenizer, model_config)
        self.corpora: list[TokenCorpus] = [self._open(source.files) for source in inputs.sources]
        self.eval_sets: list[PackedDataset] = []
        selections: list[Documents | None] = [None] * len(self.corpora)
        if inputs.eval_files:
            self.eval_sets = [self._dataset(self._open(inputs.eval_files), None, shuffle=False)]
        elif config.train.eval_steps:
            for number, corpus in enumerate(self.corpora):
                selections[number], held_out = split_documents(corpus, config.data.eval_fraction, config.train.seed)
                self.eval_sets.append(self._dataset(corpus, held_out, shuffle=False))
        train_sets = [
            self._dataset(corpus, selection, shuffle=config.data.shuffle, train=True)
            for corpus, selection in zip(self.corpora, selections, strict=True)
        ]
        self._train_sets = train_sets
        self.train_set: PackedDataset | MixedDataset = train_sets[0]
        if config.data.train is not None:
            weights, names = zip(*((source.weight, source.name) for source in inputs.sources), strict=True)
            self.train_set = MixedDataset(train_sets, weights, names, config.train.seed)

    @property
    def size(self) -> int:
        """Bytes of training text."""
        return int(sum(corpus.sizes.sum() for corpus in self.corpora))

    @property
    def tokenized_at_start(self) -> bool:
        """Whether all training text is tokenized before the first step, so that the steps can be counted."""
        return self.size <= self._at_start

    @property
    def _at_start(self) -> int:
        return _MEDIA_AT_START if self.config.task == "vlm" else _TOKENIZED_AT_START

    @property
    def is_complete(self) -> bool:
        """Whether all training text is tokenized."""
        return all(corpus.is_complete for corpus in self.corpora)

    def counts(self) -> np.ndarray:
        """Number of occurrences of each token in the training text; tokenizes what is missing."""
        return np.sum([corpus.counts(len(self.tokenizer)) for corpus in self.corpora], axis=0)

    def describe(self) -> str:
        """Size of the training data."""
        if not self.tokenized_at_start:
            ahead = "" if self.is_complete else ", tokenized during training"
            return f"{self.size / 1e6:,.0f} MB of text{ahead}{self.describe_changes()}"
        tokens = sum(corpus.num_tokens() for corpus in self.corpora)
        documents = sum(corpus.num_documents() for corpus in self.corpora)
        if self.config.task == "pretrain":
            return f"{tokens:,} tokens in {documents:,} documents"
        text = f"{tokens:,} tokens in {documents:,} samples"
        if self.config.task in CHAT_TASKS:
            text += f", {sum(corpus.num_trained() for corpus in self.corpora) / max(1, tokens):.1%} of them trained"
        return text + self.describe_changes()

    def describe_changes(self) -> str:
        """The samples that were cut or left out so far, e.g. "; 3 samples left out: malformed"."""
        own = [data.corpus for data in self.eval_sets if data.corpus not in self.corpora]
        return _described(self.corpora, "samples") + _described(own, "samples of data.eval_path")

    def loader(
        self, hidden_size: int = 0, rank: int = 0, world_size: int = 1, **options: Any
    ) -> SampleLoader | TokenLoader:
        """The stateful dataloader of the training samples.

        Args:
            hidden_size: of the model; for load balancing.
            options: of the loaders.
        """
        config = self.config
        options |= {
            "rank": rank,
            "world_size": world_size,
            "num_workers": self.num_workers,
            "allow_changes": config.data.allow_changes,
        }
        if self.max_tokens is None:
            step_samples = config.train.global_batch_size
            size = micro_batch_size(config.train)
            return SampleLoader(self.train_set, size, collate_fn=self.collate_fn, step_samples=step_samples, **options)
        # A layer of width h takes about 24 h^2 FLOPs per token, and causal attention 2 h for each previous token.
        attention_cost = 1 / (12 * hidden_size) if hidden_size else 0.0
        step_tokens = config.train.global_batch_size * config.data.sample_length
        return TokenLoader(
            self.train_set,
            step_tokens,
            self.max_tokens,
            attention_cost=attention_cost,
            collate_fn=self.collate_fn,
            **options,
        )

    def evaluation_loaders(self, **options: Any) -> Iterator[EvaluationLoader]:
        """The batches of each evaluated data set; `options` as in `loader`."""
        size, max_tokens = micro_batch_size(self.config.train), self.max_tokens
        if max_tokens is not None and self.config.task == "pretrain":
            # Evaluated as samples of one size.
            size, max_tokens = max_tokens // self.config.data.sample_length, None
        # Text takes less time to assemble than processes to start.
        workers = self.num_workers if self.config.task == "vlm" else 0
        options |= {"num_workers": workers, "max_tokens": max_tokens, "collate_fn": self.collate_fn}
        for eval_set in self.eval_sets:
            yield EvaluationLoader(eval_set, size, **options)

    @property
    def collate_fn(self) -> Any:
        """Samples to a micro batch; None for the default of the loaders."""
        if isinstance(self.encoder, LabelEncoder):
            return functools.partial(collate_labeled, per_token=bool(self.encoder.per_token))
        if isinstance(self.encoder, MultimodalEncoder):
            return MultimodalCollator(self.encoder, self.max_tokens is not None, input_dtype(self.config))
        return None

    def micro_batches(self) -> Iterator[dict[str, Any]]:
        """The training micro batches of one process, without end."""
        for batch in self.loader():
            yield from batch if isinstance(batch, list) else [batch]

    def start_tokenizing(self) -> None:
        """Tokenize first what the first step and the first evaluation need, and raise what is wrong with it."""
        for corpus, dataset in zip(self.corpora, self._train_sets, strict=True):
            order = dataset.shards_in_order()
            for eval_set in self.eval_sets:
                if eval_set.corpus is corpus:
                    # An evaluation waits for all of its shards, training only for the next ones.
                    held_out = eval_set.documents.shards
                    order = np.concatenate([order[:1], held_out, order[~np.isin(order, held_out)]])
            # This process tokenizes the first shard itself, with all threads.
            corpus.start_processes(self.num_workers, np.roll(order, -1).tolist())
        try:
            for dataset in [*self._train_sets, *self.eval_sets]:
                if dataset.corpus.sizes.sum() <= self._at_start:
                    dataset.corpus.prepare(dataset.documents.shards)
                dataset.prepare(0)
        except BaseException:
            self.close()
            raise

    def check_processes(self) -> None:
        """Raise the error of a tokenizing process."""
        for corpus in self.corpora:
            corpus.check_processes()

    def close(self) -> None:
        """Stop the tokenizing processes."""
        for corpus in self.corpora:
            corpus.close()

    def _open(self, files: list[Path]) -> TokenCorpus:
        data = self.config.data
        shards: dict[str, Any] = {"shard_bytes": _MEDIA_SHARD_BYTES} if self.config.task == "vlm" else {}
        return open_corpus(
            files,
            self.encoder,
            sample_by=data.sample_by,
            format=data.format,
            cache_dir=data.cache_dir,
            **shards,
        )

    def _dataset(
        self, corpus: TokenCorpus, documents: Documents | None, *, shuffle: bool, train: bool = False
    ) -> PackedDataset:
        data, task = self.config.data, self.config.task
        whole = task != "pretrain" or (train and self.max_tokens is not None)
        return PackedDataset(
            corpus,
            data.sample_length,
            packing=data.packing and not whole,
            shuffle=shuffle,
            seed=self.config.train.seed,
            documents=documents,
            pad_token_id=padding_token(self.tokenizer),
            drop_last=train,
        )


def _described(corpora: list[TokenCorpus], samples: str) -> str:
    counts: Counter[str] = sum((corpus.sample_counts() for corpus in corpora), Counter())
    done = {
        "truncated": "cut to data.max_seq_len",
        "tag": "with <image>, <video>, <audio> or <img> as text, which stands for none of a column",
        "unnamed media": "with the media of columns at the start of the first user's turn, for lack of tags",
    }
    return "".join(f"; {count:,} {samples} {done.get(what, f'left out: {what}')}" for what, count in counts.items())


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that pads samples."""
    pad = tokenizer.pad_token_id
    return pad if pad is not None else tokenizer.eos_token_id or 0


def open_tokenizer(config: RunConfig, inputs: RunInputs, model_config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """The run's tokenizer, with the model config's end-of-sequence token where it has none (a bare tokenizer.json)."""
    tokenizer = load_tokenizer(inputs.tokenizer_path, trust_remote_code=config.model.trust_remote_code)
    if tokenizer.eos_token_id is None:
        eos = getattr(model_config, "eos_token_id", None)
        eos = eos[0] if isinstance(eos, list) and eos else eos
        if isinstance(eos, int) and 0 <= eos < len(tokenizer):
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos)
    return tokenizer


def set_sample_length(data: DataConfig, model_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set `data.max_seq_len` where it was left out.

    Raises:
        ConfigError: it was set to more than the model's number of positions.
    """
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if data.max_seq_len is None:
        limits = (positions, tokenizer.model_max_length, data.max_tokens_per_batch)
        data.max_seq_len = min(_USUAL_LENGTH, *(limit for limit in limits if limit is not None and limit > 1))
    elif positions is not None and data.max_seq_len > positions:
        raise ConfigError(
            f"data.max_seq_len={data.max_seq_len} exceeds the model's max_position_embeddings={positions}",
            hint=f"set data.max_seq_len to {positions} or less, or increase max_position_embeddings in config.json",
        )


def make_encoder(
    config: RunConfig, inputs: RunInputs, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig
) -> Encoder:
    """The encoder of the run's task.

    Raises:
        DataError: a tokenizer or files that do not fit the task.
    """
    data = config.data
    if config.task == "pretrain":
        return TextEncoder(tokenizer, data.text_field, data.append_eos, data.split_special_tokens)
    common: dict[str, Any] = {"long_samples": data.long_samples, "on_bad_sample": data.on_bad_sample}
    if config.task == "vlm":
        return _multimodal_encoder(config, inputs, tokenizer, model_config, common)
    if config.task == "sft":
        load_chat_template(tokenizer, data.chat_template)
        return ChatEncoder(
            tokenizer,
            data.sample_length,
            train_on=data.train_on,
            append_eos=data.append_eos,
            plain=data.chat_template == "none",
            **common,
        )
    encoder = LabelEncoder(
        tokenizer, data.sample_length, text_field=data.text_field, label_field=data.label_field, **common
    )
    files = [file for source in inputs.sources for file in source.files]
    _inspect(encoder, [*files, *inputs.eval_files], data.format)
    known = dict(model_config.id2label or {})
    # A config that was never given names has these two, which are not labels.
    checkpoint = [] if known == {0: "LABEL_0", 1: "LABEL_1"} else [str(known[number]) for number in sorted(known)]
    encoder.names = (
        data.label_names or encoder.class_names or checkpoint or find_label_names(encoder, files, data.format)
    )
    if len(set(encoder.names)) < max(2, len(encoder.names)):
        raise DataError(
            "a classifier needs at least two different labels",
            found=", ".join(encoder.names),
            hint="set data.label_names to the names of all labels",
        )
    return encoder


def _multimodal_encoder(
    config: RunConfig,
    inputs: RunInputs,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    common: dict[str, Any],
) -> MultimodalEncoder:
    data = config.data
    processor: Any = load_processor(inputs.tokenizer_path, trust_remote_code=config.model.trust_remote_code)
    if data.chat_template is None and getattr(processor, "chat_template", None):
        tokenizer.chat_template = processor.chat_template
    load_chat_template(tokenizer, data.chat_template)
    processor.tokenizer, processor.chat_template = tokenizer, tokenizer.chat_template
    positions = rope_positions(model_config)
    try:
        # Of the configuration, not of a sample.
        positions.model  # noqa: B018
    except Exception as error:
        raise config_error(
            f"{positions.class_name} cannot be built from its config", positions.config.to_dict(), error
        ) from error
    return encoder_class(tokenizer)(
        processor,
        positions.config,
        positions,
        data.sample_length,
        MediaLoader(
            processor,
            Limits(data.max_pixels, data.max_frames, data.max_fps),
            data.use_audio_in_video,
            data.media_dir,
        ),
        PlaceholderCheck(positions),
        AudioRows(audio.rows, audio.window) if (audio := ModuleReader(positions.model).audio) else None,
        train_on=data.train_on,
        append_eos=data.append_eos,
        plain=data.chat_template == "none",
        **common,
    )


def _inspect(encoder: LabelEncoder, files: list[Path], format: str) -> None:
    problems: list[str] = []
    for file in files:
        encoder.inspect(file, format, problems)
    if problems:
        raise DataError(list_problems("the data cannot be read", problems))
