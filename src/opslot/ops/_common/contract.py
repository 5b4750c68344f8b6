"""Kernels whose arguments are read in one place of their op."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
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


def variants_of(
    run: Callable[[A], T], arguments: Iterable[Callable[..., A]], module: str = ""
) -> tuple[Callable[..., T], ...]:
    """A kernel for each of `arguments`, the functions that read the arguments of an op's variants.

    The kernels have their names and docstrings, and are to be assigned to these names.

    Args:
        module: that assigns them, by default that of `run`: functions print and are pickled by module and name.
    """
    kernels = []
    for each in arguments:
        kernel: Any = takes(each)(run)
        kernel.__module__, kernel.__doc__ = module or run.__module__, each.__doc__
        kernel.__name__ = kernel.__qualname__ = each.__name__
        kernels.append(kernel)
    return tuple(kernels)
