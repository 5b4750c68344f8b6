"""`CheckpointSaver`: writes checkpoints in the background while training continues."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from opslot._base.logging import get_logger
from opslot.checkpoint.training_state import Snapshot, discard, write_snapshot
from opslot.distributed.consensus import is_first_rank
from opslot.trainer.checkpointing import checkpoint_name, find_checkpoints

logger = get_logger(__name__)


class CheckpointSaver:
    """Writes snapshots, one at a time.

    In the background, `save` returns once the tensors are copied to host memory, and a thread with its own gloo group
    writes the copy. A checkpoint gets its name when it is complete on all ranks. The next `save` or `wait` raises an
    error of the background; `failed` shows it before that.

    Every rank makes the same calls.

    Args:
        folder: where the checkpoints are written.
        keep: number of checkpoints to keep; None keeps all.
        background: False writes before `save` returns and makes no copy.
    """

    def __init__(self, folder: Path, *, keep: int | None = None, background: bool = True) -> None:
        self.folder = folder
        self.keep = keep
        self.background = background
        self._group: Any = None
        self._stager: BlockingAsyncStager | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether the save in the background ended with an error that has not been raised yet."""
        return self._error is not None

    def save(self, snapshot: Snapshot) -> Path:
        """Wait for the previous save, then write `snapshot`; returns its folder, which exists when it is complete.

        Raises:
            CheckpointError: this save failed, or the previous one in the background; earlier checkpoints are intact.
        """
        self.wait()
        folder = self.folder / checkpoint_name(snapshot.step)
        if not self.background:
            self._write(folder, snapshot)
            return folder
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        copy = dataclasses.replace(snapshot, tensors=self._stage(snapshot.tensors))
        # A daemon thread, so that a hanging disk or rank does not keep a failing process alive.
        self._thread = threading.Thread(
            target=self._write_copy, args=(folder, copy), name="opslot-checkpoint", daemon=True
        )
        self._thread.start()
        return folder

    def wait(self) -> None:
        """Wait until no save is running.

        Raises:
            CheckpointError: the save in the background failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, seconds: float = 30.0) -> None:
        """Wait up to `seconds` for a running save, then abandon it, so that an error of the run is not delayed.

        An abandoned save leaves an unfinished folder, which the next run removes.
        """
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                logger.warning("the checkpoint being written was abandoned; the previous one is intact")
            elif self._error is not None:
                logger.warning("%s", self._error)
        self._thread = self._error = None
        self._stager = None

    def _stage(self, tensors: dict[str, Any]) -> Any:
        """A copy of `tensors` in host memory; on a GPU it is pinned and reused by the next save."""
        if self._stager is None:
            # DefaultStager, which torch recommends, failed at its second snapshot on a GPU under torch 2.11.
            self._stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())
        return self._stager.stage(tensors)

    def _write(self, folder: Path, snapshot: Snapshot) -> None:
        """Write a checkpoint, then remove all but the newest."""
        write_snapshot(folder, snapshot, self._group)
        if self.keep and is_first_rank():
            for old in find_checkpoints(self.folder)[: -self.keep]:
                discard(old)

    def _write_copy(self, folder: Path, copy: Snapshot) -> None:
        try:
            self._write(folder, copy)
        except BaseException as error:
            self._error = error
        if not torch.cuda.is_available():
            self._stager = None
