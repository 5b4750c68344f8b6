"""Protocols of converters between a checkpoint's tensors and the model's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from opslot.checkpoint.tensor_slice import TensorSlice

Shapes = Mapping[str, tuple[int, ...]]


@runtime_checkable
class CheckpointTensorConverter(Protocol):
    """Converts tensors of a checkpoint, given one by one, into the model's.

    In a dry run the loader first calls a deep copy with meta tensors, to check names and shapes before anything is
    written: `convert` must not depend on values.
    """

    def can_handle(self, name: str) -> bool:
        """Whether this converter takes the checkpoint's tensor `name`."""
        ...

    def convert(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]] | None:
        """The model's (name, tensor) pairs that this tensor completes; None if there are none yet."""
        ...

    def finalize(self) -> list[tuple[str, Tensor]]:
        """The pairs that remain after the last tensor.

        Raises:
            CheckpointError: tensors that are incomplete.
        """
        ...


@runtime_checkable
class SlicingConverter(Protocol):
    """A converter that only moves values: it maps each tensor to a slice of a parameter, and the loader copies it.

    A rank reads only what it keeps.
    """

    def can_handle(self, name: str) -> bool:
        """Whether this converter takes the checkpoint's tensor `name`."""
        ...

    def inspect(self, shapes: Shapes) -> None:
        """Look at all tensors of the checkpoint before the first `slice_of`.

        Raises:
            CheckpointError: the tensors are contradictory or ambiguous.
        """
        ...

    def slice_of(self, name: str, shape: tuple[int, ...]) -> TensorSlice:
        """The slice that tensor `name` fills; its shape is the expected one."""
        ...

    def missing(self, names: Iterable[str]) -> list[str]:
        """Descriptions of what is missing in the parameters that `names` fill partly."""
        ...


Converter = CheckpointTensorConverter | SlicingConverter
