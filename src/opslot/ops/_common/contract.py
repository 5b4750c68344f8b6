"""Kernels whose arguments are read in one place of their op."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
A = TypeVar("A")
T = TypeVar("T")


def takes(arguments: Callable[P, A]) -> Callable[[Callable[[A], T]], Callable[P, T]]:
    """Decorator of a kernel of one argument, which `arguments` makes of a call: the signature is that of `arguments`.

    Args:
        arguments: a NamedTuple, or a function.
    """

    def decorate(run: Callable[[A], T]) -> Callable[P, T]:
        @functools.wraps(run)
        def kernel(*args: P.args, **kwargs: P.kwargs) -> T:
            return run(arguments(*args, **kwargs))

        described: Any = kernel
        described.__signature__ = inspect.signature(arguments)
        described.__doc__ = run.__doc__ or arguments.__doc__
        return kernel

    return decorate
