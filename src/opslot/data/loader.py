"""Batches in an order that is the same for any number of ranks, and whose place is one integer."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from opslot._base.errors import DataError
from opslot.data.balance import share_out
from opslot.data.packing import PackedRows, collate, padded_row

# Rows of which a step may look ahead.
_COUNTED_AT_ONCE = 64


class _Loader:
    """What loaders of rows share: how many rows are consumed, over all ranks; follows torch's Stateful protocol, as
    torchdata's StatefulDataLoader does. What workers prefetched does not count as consumed."""

    def __init__(self, rows: PackedRows, rank: int, world_size: int, num_workers: int, pin_memory: bool) -> None:
        self.rows = rows
        self.rank = rank
        self.world_size = world_size
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.consumed = 0

    @property
    def epoch(self) -> float:
        """Passes over the data so far, see `PackedRows.epochs`."""
        return self.rows.epochs(self.consumed)

    def identity(self) -> dict[str, Any]:
        """What decides what a number of consumed rows means."""
        return self.rows.identity()

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, in rows, and what the rows are made of."""
        return {"consumed": self.consumed, "rows": self.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state` was taken; takes effect at the next `iter`.

        Raises:
            DataError: the rows are not the same ones, so the place means nothing; names what changed. Or the state is
                another loader's.
        """
        now, then = self.identity(), state.get("rows")
        if not isinstance(then, dict) or not isinstance(state.get("consumed"), int):
            raise DataError(
                f"the saved place in the data is not one of a {type(self).__name__}",
                found=f"{', '.join(map(str, state)) or 'nothing'}; expected: consumed, rows",
                hint="go on with the loader that it was saved with, or start a new run in another train.output_dir",
            )
        changed = [
            f"{name}: {then.get(name, 'none')} then, {now.get(name, 'none')} now"
            for name in (now | then)
            if then.get(name) != now.get(name)
        ]
        if changed:
            raise DataError(
                "the run cannot be resumed, its data is not what it was:\n"
                + "\n".join(f"- {line}" for line in changed),
                hint="restore the files and settings, or start a new run in another train.output_dir"
                " (model.model_path takes the exported weights)",
            )
        self.consumed = state["consumed"]


class RowLoader(_Loader):
    """Endless micro batches of `PackedRows`.

    The ranks' micro batches of one moment are consecutive rows, so a step's global batch holds the same rows whatever
    the number of ranks and the micro batch size.

    Args:
        rows: the rows.
        micro_batch_size: rows in a batch of this rank.
        rank, world_size: place of this process among those that share the data.
        num_workers: processes that assemble batches; 0 does it here.
        pin_memory: allocate batches in page-locked memory, for copies to a GPU.
    """

    def __init__(
        self,
        rows: PackedRows,
        micro_batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(rows, rank, world_size, num_workers, pin_memory)
        self.micro_batch_size = micro_batch_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        loader = DataLoader(
            self.rows,
            batch_sampler=_RowNumbers(self),
            collate_fn=collate,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            generator=_own_generator(),
            worker_init_fn=_leave_signals_to_parent,
        )
        for batch in loader:
            self.consumed += self.micro_batch_size * self.world_size
            yield batch


def _leave_signals_to_parent(_worker: int) -> None:
    """Signals that stop a run often reach all of its processes; workers are needed until the step is done."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _own_generator() -> torch.Generator:
    """What a DataLoader draws its workers' seed from; a draw from torch's own would shift those of the model."""
    return torch.Generator()


class _RowNumbers:
    """This rank's row numbers, batch by batch, without end."""

    def __init__(self, loader: RowLoader) -> None:
        self.rows = loader.rows
        self.size = loader.micro_batch_size
        self.first = loader.consumed + loader.rank * self.size
        self.stride = self.size * loader.world_size
        # Here, so that workers inherit what is known of the rows before.
        self.rows.prepare(self.first)

    def __iter__(self) -> Iterator[list[int]]:
        first = self.first
        while True:
            # Workers never tokenize: they are told numbers whose tokens are there.
            self.rows.prepare(first + self.size - 1)
            yield list(range(first, first + self.size))
            first += self.stride


class TokenLoader(_Loader):
    """Endless optimizer steps of whole documents, each step a list of this rank's micro batches.

    A step takes the next documents, in their order, up to `step_tokens`; so it holds the same ones whatever the number
    of ranks and the size of micro batches. Then `share_out` divides them: no padding, micro batches of at most
    `max_tokens`, as many on each rank, ranks equally busy.

    Args:
        rows: of one document each (`packing=False`).
        step_tokens: tokens in an optimizer step, over all ranks; a document that would exceed them is the next step's
            first.
        max_tokens: tokens in a micro batch of this rank, at least `rows.max_seq_len`.
        attention_share: see `share_out`.
        rank, world_size, num_workers, pin_memory: as in `RowLoader`.

    Attributes:
        step_size: tokens of the step last taken, over all ranks.
    """

    def __init__(
        self,
        rows: PackedRows,
        step_tokens: int,
        max_tokens: int,
        *,
        attention_share: float = 0.0,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(rows, rank, world_size, num_workers, pin_memory)
        self.step_tokens = step_tokens
        self.max_tokens = max_tokens
        self.attention_share = attention_share
        self.step_size = 0

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        loader = DataLoader(
            _MicroBatches(self.rows),
            batch_size=None,
            sampler=_Shares(self),
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            generator=_own_generator(),
            worker_init_fn=_leave_signals_to_parent,
        )
        for count, self.step_size, micro_batches in loader:
            self.consumed += count
            yield micro_batches

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "batches": "whole documents, by tokens (data.max_tokens_per_batch)"}

    def steps(self, epochs: float) -> int:
        """Optimizer steps that consume `epochs` of documents, the last one perhaps more."""
        first, count, total = 0, 0, max(1, round(self.rows.rows_per_epoch * epochs))
        while first < total:
            first += len(self.step_lengths(first))
            count += 1
        return count

    def step_lengths(self, first: int) -> np.ndarray:
        """Tokens of each document of the step that begins with row number `first`, int64."""
        lengths: list[np.ndarray] = []
        tokens = count = 0
        while tokens <= self.step_tokens:
            lengths.append(self.rows.token_counts(first + count, first + count + _COUNTED_AT_ONCE))
            tokens += int(lengths[-1].sum())
            count += _COUNTED_AT_ONCE
        ends = np.concatenate(lengths).cumsum()
        taken = max(1, int(np.searchsorted(ends, self.step_tokens, side="right")))
        return np.diff(ends[:taken], prepend=0)


class _Shares:
    """This rank's share of each step without end: rows and tokens of the whole step, and the numbers of its own rows by
    micro batch."""

    def __init__(self, loader: TokenLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[tuple[int, int, list[list[int]]]]:
        loader, first = self.loader, self.loader.consumed
        while True:
            lengths = loader.step_lengths(first)
            shares = share_out(lengths, loader.world_size, loader.max_tokens, loader.attention_share)
            own = [[first + place for place in places] for places in shares[loader.rank]]
            yield len(lengths), int(lengths.sum()), own
            first += len(lengths)


class _MicroBatches(Dataset):
    """Micro batches [1, tokens] from the numbers of their rows."""

    # A rank without a document runs one that predicts nothing, since sharded parameters take every rank to gather.
    _IDLE_TOKENS = 8

    def __init__(self, rows: PackedRows) -> None:
        self.rows = rows

    def __getitem__(self, share: tuple[int, int, list[list[int]]]) -> tuple[int, int, list[dict[str, Any]]]:
        count, tokens, own = share
        return count, tokens, [self._collate(numbers) for numbers in own]

    def _collate(self, numbers: list[int]) -> dict[str, Any]:
        pieces = [piece for number in numbers for piece in self.rows.tokens(number)]
        size = sum(map(len, pieces)) or self._IDLE_TOKENS
        return collate([padded_row(pieces, size, self.rows.pad_token_id)])


def _as_it_is(value: Any) -> Any:
    return value


def evaluation_batches(rows: PackedRows, micro_batch_size: int) -> Iterator[dict[str, Any]]:
    """Every row of one epoch once, in batches of at most `micro_batch_size`."""
    for first in range(0, rows.rows_per_epoch, micro_batch_size):
        last = min(first + micro_batch_size, rows.rows_per_epoch)
        yield collate([rows[number] for number in range(first, last)])
