"""Results computed from the values of a tensor, since a model passes the same tensors to every layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class TensorCache(Generic[T]):
    """The latest results, each valid while its tensor lives and is not modified.

    Args:
        size: results that are kept.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._entries: list[tuple[weakref.ref[Tensor] | None, Any, T]] = []

    def get(self, tensor: Tensor | None, compute: Callable[[], T], *key: Any) -> T:
        """`compute()`, or its earlier result for the same tensor and `key`.

        Nothing is kept under torch.compile, of tensor subclasses, and of inference tensors, which do not count their
        modifications.
        """
        if torch.compiler.is_compiling():
            return compute()
        if tensor is not None:
            if type(tensor) is not Tensor or tensor.is_inference():
                return compute()
            key = (*key, tensor._version)
        for reference, known, result in self._entries:
            if known == key and (tensor is None if reference is None else reference() is tensor):
                return result
        result = compute()
        self._entries.append((None if tensor is None else weakref.ref(tensor), key, result))
        del self._entries[: -self.size]
        return result
