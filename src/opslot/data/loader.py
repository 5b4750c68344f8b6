"""Micro batches in an order that is the same for any number of ranks, and whose place is one integer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from opslot._base.errors import DataError
from opslot.data.packing import PackedRows, collate


class RowLoader:
    """Endless micro batches of `PackedRows`; follows torch's Stateful protocol, as torchdata's StatefulDataLoader does.

    The ranks' micro batches of one moment are consecutive rows, so a step's global batch holds the same rows whatever
    the number of ranks and the micro batch size. What workers prefetched does not count as consumed.

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
        self.rows = rows
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.consumed = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        loader = DataLoader(
            self.rows,
            batch_sampler=_RowNumbers(self.consumed, self.micro_batch_size, self.rank, self.world_size),
            collate_fn=collate,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )
        for batch in loader:
            self.consumed += self.micro_batch_size * self.world_size
            yield batch

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.consumed / self.rows.rows_per_epoch

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, in rows, and what the rows are made of."""
        return {"consumed": self.consumed, "rows": self.rows.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state` was taken; takes effect at the next `iter`.

        Raises:
            DataError: the rows are not the same ones, so the place means nothing; names what changed.
        """
        now, then = self.rows.identity(), state["rows"]
        changed = [
            f"{name}: {then.get(name)} then, {value} now" for name, value in now.items() if then.get(name) != value
        ]
        if changed:
            raise DataError(
                "the run cannot be resumed, its data is not what it was:\n"
                + "\n".join(f"- {line}" for line in changed)
                + "\n  to do: restore the files and settings, or start a new run in another train.output_dir"
                " (model.model_path takes the exported weights)"
            )
        self.consumed = state["consumed"]


class _RowNumbers:
    """This rank's row numbers, batch by batch, without end."""

    def __init__(self, start: int, micro_batch_size: int, rank: int, world_size: int) -> None:
        self.first = start + rank * micro_batch_size
        self.size = micro_batch_size
        self.stride = micro_batch_size * world_size

    def __iter__(self) -> Iterator[list[int]]:
        first = self.first
        while True:
            yield list(range(first, first + self.size))
            first += self.stride


def evaluation_batches(rows: PackedRows, micro_batch_size: int) -> Iterator[dict[str, Any]]:
    """Every row of one epoch once, in batches of at most `micro_batch_size`."""
    for first in range(0, rows.rows_per_epoch, micro_batch_size):
        last = min(first + micro_batch_size, rows.rows_per_epoch)
        yield collate([rows[number] for number in range(first, last)])
