"""What turns a checkpoint's tensors into the model's when names or shapes differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from opslot.checkpoint.placement import Placement

Shapes = Mapping[str, tuple[int, ...]]


@runtime_checkable
class CheckpointTensorConverter(Protocol):
    """Turns tensors of a checkpoint, given one by one, into the model's.

    The loader calls a deep copy with tensors on the meta device first, so that names and shapes are known
    before anything is
    written: `convert` must not read values to decide what it returns.
    """

    def can_handle(self, name: str) -> bool:
        """Whether the checkpoint's tensor `name` is this converter's."""
        ...

    def convert(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]] | None:
        """The model's (name, tensor) pairs that are complete with this tensor; None while collecting."""
        ...

    def finalize(self) -> list[tuple[str, Tensor]]:
        """What is still to be handed out after the last tensor.

        Raises:
            CheckpointError: tensors that never became complete.
        """
        ...


@runtime_checkable
class PlacingConverter(CheckpointTensorConverter, Protocol):
    """A converter that only moves values: it says where each tensor goes, and the loader copies it there,
    slice by slice.

    Nothing is collected, and a rank reads no more than what it keeps.
    """

    def inspect(self, shapes: Shapes) -> None:
        """See every tensor that the checkpoint holds, by name, before the first `place`.

        Raises:
            CheckpointError: the tensors contradict each other, or leave open what they mean.
        """
        ...

    def place(self, name: str, shape: tuple[int, ...]) -> Placement:
        """Where tensor `name` goes; the placement's shape is what it should have had."""
        ...

    def missing(self, names: Iterable[str]) -> list[str]:
        """What the checkpoint's `names` leave unfilled in targets that they touch, in words."""
        ...
