"""Kernels that move rows, run beside products that leave them room."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Beside:
    """Launches that run beside what the current stream gets from here on until `join`; on a GPU, where it is worth it.

    The grouped products leave registers and memory bandwidth that a kernel which only moves rows can use.
    """

    def __init__(self, like: Tensor) -> None:
        # Below this, the host's time for the events is as long as what they hide.
        self._side = _side_stream(like.device) if like.is_cuda and like.numel() >= 2**26 else None
        if self._side is not None:
            self._ready = torch.cuda.current_stream().record_event()

    def launch(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call `function`, which must allocate nothing: memory belongs to the stream that it was allocated on.

        Launch it after the product: programs are placed in order of launch, and this one would fill the machine.
        """
        if self._side is None:
            function(*arguments)
            return
        self._side.wait_event(self._ready)
        with torch.cuda.stream(self._side):
            function(*arguments)

    def join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
