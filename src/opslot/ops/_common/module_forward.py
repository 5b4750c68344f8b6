"""Kernels of modules whose classes have no slots, such as torch's norms and the activations of Transformers.

They replace the forward of the instance, so hooks of the module run around them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_Kernel = Callable[..., Tensor]


@dataclass(frozen=True)
class ModuleForward:
    """`attach`, `detach` and `check_module` of an op that is selected per module.

    Attributes:
        call: computes the forward of a module with a kernel, from (module, kernel, input); of a Python module, so that
            models can be pickled.
    """

    call: Callable[[Any, _Kernel, Tensor], Tensor]

    def attach(self, module: Any, slot: Any, kernel: _Kernel | None) -> None:
        """Replace the forward of the instance, unless it keeps eager code."""
        if kernel is not None:
            module.__dict__["forward"] = functools.partial(self.call, module, kernel)

    def detach(self, module: Any, state: None) -> None:
        """Give the instance the forward of its class again."""
        if self.replaced_by_others(module) is None:
            module.__dict__.pop("forward", None)

    def replaced_by_others(self, module: Any) -> str | None:
        """Why a module runs more than the forward of its class, or None."""
        forward = module.__dict__.get("forward")
        if forward is None or getattr(forward, "func", None) is self.call:
            return None
        return "the forward of the module was replaced"
