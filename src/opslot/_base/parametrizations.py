"""Parametrized weights (torch.nn.utils.parametrizations), which are computed each time they are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_updates(model: Any) -> Iterator[None]:
    """Context in which reading weights changes no buffer, as the power iteration of spectral norm does in training."""
    # patchgen imports this module without torch.
    from torch.nn.utils.parametrize import ParametrizationList

    lists = (module for module in model.modules() if isinstance(module, ParametrizationList))
    training = [module for found in lists for module in found.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
