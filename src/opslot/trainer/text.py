"""`TextTrainer`: a causal language model on text files."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from opslot._base.errors import ConfigError
from opslot.checkpoint import export_hf
from opslot.data import (
    Documents,
    PackedDataset,
    SampleLoader,
    TokenCorpus,
    TokenLoader,
    count_targets,
    evaluation_batches,
    load_tokenizer,
    open_corpus,
    split_documents,
)
from opslot.distributed import sum_over_ranks
from opslot.models import build_foundation_model, load_config
from opslot.ops.cross_entropy_loss import loss_only
from opslot.slots.protocol import keeps_sequences
from opslot.trainer.base import BaseTrainer, TrainResult
from opslot.trainer.validate import micro_batch_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Up to this many bytes of text are tokenized before the first step (seconds), so that the steps can be counted.
_TOKENIZED_AT_START = 16 << 20
# Up to this many bytes of text, tokens are counted for the reference line of the loss curve.
_COUNTED_FOR_CURVE = 1 << 30


class TextTrainer(BaseTrainer):
    """Trains a model from `opslot.build_foundation_model` to predict the next token of packed documents."""

    def build_data(self) -> SampleLoader | TokenLoader:
        config = self.config
        # Before the tokenizer: AutoTokenizer also reads config.json, and would report its errors as the tokenizer's.
        self.model_config = load_config(self.inputs.config_path, trust_remote_code=config.model.trust_remote_code)
        self.tokenizer = load_tokenizer(self.inputs.tokenizer_path, trust_remote_code=config.model.trust_remote_code)
        if self.tokenizer.eos_token_id is None:
            self._take_eos_from_model()
        self._check_sizes()
        self.corpus = self._open(self.inputs.train_files)
        train_documents: Documents | None = None
        self.eval_set: PackedDataset | None = None
        if self.inputs.eval_files:
            self.eval_set = self._dataset(self._open(self.inputs.eval_files), None, shuffle=False)
        elif config.train.eval_steps:
            train_documents, held_out = split_documents(self.corpus, config.data.eval_fraction, config.train.seed)
            self.eval_set = self._dataset(self.corpus, held_out, shuffle=False)
        max_tokens = config.data.max_tokens_per_batch
        self.train_set = self._dataset(
            self.corpus,
            train_documents,
            shuffle=config.data.shuffle,
            packing=config.data.packing and max_tokens is None,
        )
        self._start_tokenizing()
        options: dict[str, Any] = {
            "rank": self.state.dp_rank,
            "world_size": self.state.dp_size,
            "num_workers": config.data.num_workers,
            "pin_memory": self.device.type == "cuda",
            "allow_changes": config.data.allow_changes,
        }
        if max_tokens is None:
            return SampleLoader(self.train_set, micro_batch_size(config.train), **options)
        # A layer of width h takes about 24 h^2 FLOPs per token, and causal attention 2 h for each previous token.
        attention_cost = 1 / (12 * self.model_config.get_text_config().hidden_size)
        step_tokens = config.train.global_batch_size * config.data.max_seq_len
        return TokenLoader(self.train_set, step_tokens, max_tokens, attention_cost=attention_cost, **options)

    def next_micro_batches(self, batches: Iterator[Any]) -> list[dict[str, Any]]:
        self.corpus.check_processes()
        if isinstance(self.batches, TokenLoader):
            return next(batches)
        return super().next_micro_batches(batches)

    def count_tokens(self, micro_batches: list[dict[str, Any]]) -> int:
        if isinstance(self.batches, TokenLoader):
            return self.batches.step_size
        return super().count_tokens(micro_batches)

    def train(self) -> TrainResult:
        with contextlib.closing(self.corpus):
            return super().train()

    def build_model(self) -> PreTrainedModel:
        model = self.config.model
        # Random weights are also drawn after sharding, so that they are the same on any mesh.
        later = model.model_path is None or self.state.mesh is not None
        built = build_foundation_model(
            self.inputs.config_path,
            weights_path=None if later else model.model_path,
            torch_dtype=model.torch_dtype,
            init_device="meta" if later else self.device.type,
            run_device=self.device.type,
            run_dtype=self.config.train.fsdp.compute_dtype,
            ops_implementation=model.ops_implementation,
            trust_remote_code=model.trust_remote_code,
        )
        data = self.config.data
        if data.packing and (reason := keeps_sequences(built)):
            also = "" if data.max_tokens_per_batch is None else " and remove data.max_tokens_per_batch"
            raise ConfigError(
                f"{type(built).__name__} cannot train on packed documents, which would see each other",
                found=reason,
                hint=f"set data.packing: false{also}",
            )
        return built

    def count_steps(self) -> int | None:
        train = self.config.train
        if train.max_steps is not None:
            return train.max_steps
        if self.corpus.sizes.sum() > _TOKENIZED_AT_START:
            return None
        if isinstance(self.batches, TokenLoader):
            return self.batches.steps(train.num_epochs)
        samples = self.train_set.samples_per_epoch * train.num_epochs
        return max(1, math.ceil(samples / train.global_batch_size))

    def progress(self) -> float:
        assert isinstance(self.batches, SampleLoader | TokenLoader), "these loaders report their progress"
        return self.batches.epoch / self.config.train.num_epochs

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean cross entropy of the held-out documents in nats per token."""
        assert self.eval_set is not None, "evaluation needs train.eval_steps or data.eval_path"
        self.model.eval()
        total, targets = 0.0, 0
        data = self.config.data
        by_tokens = data.max_tokens_per_batch
        size = micro_batch_size(self.config.train) if by_tokens is None else by_tokens // data.max_seq_len
        batches = evaluation_batches(self.eval_set, size)
        with loss_only(self.model):
            while concurrent := list(itertools.islice(batches, self.state.dp_size)):
                # FSDP needs every rank for its collectives, so a rank without a batch runs one that does not count.
                own = min(self.state.dp_rank, len(concurrent) - 1)
                batch = concurrent[own]
                count = count_targets(batch["labels"]) if own == self.state.dp_rank else 0
                cross_entropy, _ = self.split_loss(self.forward(batch, count))
                total += cross_entropy.item() * count
                targets += count
        self.model.train()
        total, counted = sum_over_ranks(total, targets)
        # The ranks of one sequence count the same targets, and each computes a part of their loss.
        return total / max(1, counted / self.state.sp)

    def export(self, folder: Path) -> None:
        """Write weights, config and tokenizer so that plain Transformers loads them."""
        export_hf(self.model, folder, processors=[self.tokenizer])

    @functools.cached_property
    def unigram_entropy(self) -> float:
        """Entropy of the token frequencies in nats: the loss of a model that predicts them without any context."""
        counts = self.corpus.counts(len(self.tokenizer))
        frequencies = counts[counts > 0] / counts.sum()
        return float(-(frequencies * np.log(frequencies)).sum())

    @property
    def reference_loss(self) -> float | None:
        counted = self.corpus.is_complete and self.corpus.sizes.sum() <= _COUNTED_FOR_CURVE
        return self.unigram_entropy if counted else None

    def describe_data(self) -> str:
        """Size of the training text."""
        if self.corpus.sizes.sum() <= _TOKENIZED_AT_START:
            return f"{self.corpus.num_tokens():,} tokens in {self.corpus.num_documents():,} documents"
        ahead = "" if self.corpus.is_complete else ", tokenized during training"
        return f"{self.corpus.sizes.sum() / 1e6:,.0f} MB of text{ahead}"

    def _start_tokenizing(self) -> None:
        """Tokenize first what the first step and the first evaluation need, and raise what is wrong with it."""
        order = self.train_set.shards_in_order()
        if self.eval_set is not None and self.eval_set.corpus is self.corpus:
            # An evaluation waits for all of its shards, training only for the next ones.
            held_out = self.eval_set.documents.shards
            order = np.concatenate([order[:1], held_out, order[~np.isin(order, held_out)]])
        # This process tokenizes the first shard itself, with all threads.
        self.corpus.start_processes(self.config.data.num_workers, np.roll(order, -1).tolist())
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.corpus.close)
            for dataset in [self.train_set] if self.eval_set is None else [self.train_set, self.eval_set]:
                if dataset.corpus.sizes.sum() <= _TOKENIZED_AT_START:
                    dataset.corpus.prepare(dataset.documents.shards)
                dataset.prepare(0)
            on_error.pop_all()

    def _open(self, files: list[Path]) -> TokenCorpus:
        data = self.config.data
        return open_corpus(
            files,
            self.tokenizer,
            text_field=data.text_field,
            sample_by=data.sample_by,
            append_eos=data.append_eos,
            split_special_tokens=data.split_special_tokens,
            format=data.format,
            cache_dir=data.cache_dir,
        )

    def _dataset(
        self, corpus: TokenCorpus, documents: Documents | None, *, shuffle: bool, packing: bool | None = None
    ) -> PackedDataset:
        data = self.config.data
        pad = self.tokenizer.pad_token_id
        return PackedDataset(
            corpus,
            data.max_seq_len,
            packing=data.packing if packing is None else packing,
            shuffle=shuffle,
            seed=self.config.train.seed,
            documents=documents,
            pad_token_id=pad if pad is not None else self.tokenizer.eos_token_id or 0,
        )

    def _take_eos_from_model(self) -> None:
        """Use the model config's end-of-sequence token; a bare tokenizer.json has none."""
        eos = getattr(self.model_config, "eos_token_id", None)
        eos = eos[0] if isinstance(eos, list) and eos else eos
        if isinstance(eos, int) and 0 <= eos < len(self.tokenizer):
            self.tokenizer.eos_token = self.tokenizer.convert_ids_to_tokens(eos)

    def _check_sizes(self) -> None:
        """Check the tokenizer, the sample length and the routing against the model's config."""
        text_config = self.model_config.get_text_config()
        tokens, vocab_size = len(self.tokenizer), text_config.vocab_size
        positions = getattr(text_config, "max_position_embeddings", None)
        if tokens > vocab_size:
            raise ConfigError(
                f"the tokenizer in {self.inputs.tokenizer_path} has {tokens} tokens, more than the model's "
                f"vocab_size={vocab_size}",
                hint="use the tokenizer that ships with the checkpoint, or increase vocab_size in config.json",
            )
        if positions is not None and self.config.data.max_seq_len > positions:
            raise ConfigError(
                f"data.max_seq_len={self.config.data.max_seq_len} exceeds the model's "
                f"max_position_embeddings={positions}",
                hint="lower data.max_seq_len, or increase max_position_embeddings in config.json",
            )
        top_k = getattr(text_config, "num_experts_per_tok", None)
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        name = next((n for n in names if isinstance(getattr(text_config, n, None), int)), None)
        if isinstance(top_k, int) and name is not None and top_k > getattr(text_config, name) > 0:
            raise ConfigError(
                f"num_experts_per_tok={top_k} exceeds {name}={getattr(text_config, name)}",
                hint=f"fix them in {self.inputs.config_path}",
            )
