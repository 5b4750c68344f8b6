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
    PackedRows,
    RowLoader,
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

# Bytes of text that are tokenized whole before the first step, in seconds, so that the steps can be counted.
_TOKENIZED_AT_START = 16 << 20
# Bytes of text whose tokens are counted for the loss curve.
_COUNTED_FOR_CURVE = 1 << 30


class TextTrainer(BaseTrainer):
    """Trains `opslot.build_foundation_model`'s model to predict the next token of packed documents."""

    def build_data(self) -> RowLoader | TokenLoader:
        config = self.config
        self.tokenizer = load_tokenizer(self.inputs.tokenizer_path, trust_remote_code=config.model.trust_remote_code)
        self.model_config = load_config(self.inputs.config_path, trust_remote_code=config.model.trust_remote_code)
        if self.tokenizer.eos_token_id is None:
            self._take_eos_from_model()
        self._check_sizes()
        self.corpus = self._open(self.inputs.train_files)
        train_documents: Documents | None = None
        self.eval_rows: PackedRows | None = None
        if self.inputs.eval_files:
            self.eval_rows = self._rows(self._open(self.inputs.eval_files), None, shuffle=False)
        elif config.train.eval_steps:
            train_documents, held_out = split_documents(self.corpus, config.data.eval_fraction, config.train.seed)
            self.eval_rows = self._rows(self.corpus, held_out, shuffle=False)
        max_tokens = config.data.max_tokens_per_batch
        self.train_rows = self._rows(
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
        }
        if max_tokens is None:
            return RowLoader(self.train_rows, micro_batch_size(config.train), **options)
        # A layer of width h multiplies a token by about 12 h^2 weights, 24 h^2 FLOPs, and causal attention takes 2 h
        # for each token before it.
        share = 1 / (12 * self.model_config.get_text_config().hidden_size)
        step_tokens = config.train.global_batch_size * config.data.max_seq_len
        return TokenLoader(self.train_rows, step_tokens, max_tokens, attention_share=share, **options)

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
        # Random weights too are drawn once sharded, so that they are the same on any mesh.
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
        if self.config.data.packing and (why := keeps_sequences(built)):
            raise ConfigError(
                f"documents packed into one row could see each other in {type(built).__name__}: {why}",
                hint="set data.packing to false",
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
        rows = self.train_rows.rows_per_epoch * train.num_epochs
        return max(1, math.ceil(rows / train.global_batch_size))

    def share_done(self) -> float:
        assert isinstance(self.batches, RowLoader | TokenLoader), "only these know how much of the text is done"
        return self.batches.epoch / self.config.train.num_epochs

    @torch.no_grad()
    def evaluate(self) -> float:
        """Cross entropy of the held-out documents, nats a predicted token."""
        assert self.eval_rows is not None, "evaluation needs train.eval_steps or data.eval_path"
        self.model.eval()
        total, targets = 0.0, 0
        data = self.config.data
        by_tokens = data.max_tokens_per_batch
        size = micro_batch_size(self.config.train) if by_tokens is None else by_tokens // data.max_seq_len
        batches = evaluation_batches(self.eval_rows, size)
        with loss_only(self.model):
            while of_ranks := list(itertools.islice(batches, self.state.dp_size)):
                # Sharded parameters take every rank to gather, so a rank without a batch runs one that does not count.
                own = min(self.state.dp_rank, len(of_ranks) - 1)
                batch = of_ranks[own]
                count = count_targets(batch["labels"]) if own == self.state.dp_rank else 0
                cross_entropy, _ = self.split_loss(self.forward(batch, count))
                total += cross_entropy.item() * count
                targets += count
        self.model.train()
        total, counted = sum_over_ranks(total, targets)
        # The ranks of a sequence have the same targets, and each a share of their loss.
        return total / max(1, counted / self.state.sp)

    def export(self, folder: Path) -> None:
        """Write weights, config and tokenizer so that plain Transformers loads them."""
        export_hf(self.model, folder, processors=[self.tokenizer])

    @functools.cached_property
    def unigram_entropy(self) -> float:
        """Entropy of the corpus' token frequencies, nats: the loss of a model that knows nothing else."""
        counts = self.corpus.counts(len(self.tokenizer))
        frequencies = counts[counts > 0] / counts.sum()
        return float(-(frequencies * np.log(frequencies)).sum())

    @property
    def reference_loss(self) -> float | None:
        counted = self.corpus.is_complete and self.corpus.sizes.sum() <= _COUNTED_FOR_CURVE
        return self.unigram_entropy if counted else None

    def describe_data(self) -> str:
        """How much text there is, in words."""
        if self.corpus.sizes.sum() <= _TOKENIZED_AT_START:
            return f"{self.corpus.num_tokens():,} tokens in {self.corpus.num_documents():,} documents"
        beside = "" if self.corpus.is_complete else ", tokenized while it trains"
        return f"{self.corpus.sizes.sum() / 1e6:,.0f} MB of text{beside}"

    def _start_tokenizing(self) -> None:
        """Have what the first step and the first evaluation need come first, and find here what is wrong with it."""
        order = self.train_rows.blocks_in_order()
        if self.eval_rows is not None and self.eval_rows.corpus is self.corpus:
            # An evaluation waits for all of its blocks, training for the next ones.
            held_out = self.eval_rows.documents.blocks
            order = np.concatenate([order[:1], held_out, order[~np.isin(order, held_out)]])
        # The first block is this process's own, with as many threads as there are.
        self.corpus.start_processes(self.config.data.num_workers, np.roll(order, -1).tolist())
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.corpus.close)
            for rows in [self.train_rows] if self.eval_rows is None else [self.train_rows, self.eval_rows]:
                if rows.corpus.sizes.sum() <= _TOKENIZED_AT_START:
                    rows.corpus.prepare(rows.documents.blocks)
                rows.prepare(0)
            on_error.pop_all()

    def _open(self, files: list[Path]) -> TokenCorpus:
        data = self.config.data
        return open_corpus(
            files,
            self.tokenizer,
            text_field=data.text_field,
            sample_by=data.sample_by,
            append_eos=data.append_eos,
            cache_dir=data.cache_dir,
        )

    def _rows(
        self, corpus: TokenCorpus, documents: Documents | None, *, shuffle: bool, packing: bool | None = None
    ) -> PackedRows:
        data = self.config.data
        pad = self.tokenizer.pad_token_id
        return PackedRows(
            corpus,
            data.max_seq_len,
            packing=data.packing if packing is None else packing,
            shuffle=shuffle,
            seed=self.config.train.seed,
            documents=documents,
            pad_token_id=pad if pad is not None else self.tokenizer.eos_token_id or 0,
        )

    def _take_eos_from_model(self) -> None:
        """A bare tokenizer.json names no end-of-sequence token, but the model's config may."""
        eos = getattr(self.model_config, "eos_token_id", None)
        eos = eos[0] if isinstance(eos, list) and eos else eos
        if isinstance(eos, int) and 0 <= eos < len(self.tokenizer):
            self.tokenizer.eos_token = self.tokenizer.convert_ids_to_tokens(eos)

    def _check_sizes(self) -> None:
        """Refuse tokens and positions that the model has no room for."""
        text_config = self.model_config.get_text_config()
        wanted, offered = len(self.tokenizer), text_config.vocab_size
        longest = getattr(text_config, "max_position_embeddings", None)
        if wanted > offered:
            raise ConfigError(
                f"the tokenizer in {self.inputs.tokenizer_path} has {wanted} tokens, the model's "
                f"vocab_size is {offered}",
                hint="take the tokenizer that belongs to the model, or raise vocab_size in config.json",
            )
        if longest is not None and self.config.data.max_seq_len > longest:
            raise ConfigError(
                f"data.max_seq_len={self.config.data.max_seq_len}, but the model has positions "
                f"for {longest} tokens (max_position_embeddings)",
                hint="lower the one or raise the other",
            )
