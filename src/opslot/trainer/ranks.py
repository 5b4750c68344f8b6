"""What is done on all ranks, or on the first for all: it ends well everywhere, or with an error everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class RankError(Exception):
    """What failed on one rank, raised on all."""


def torch_distributed() -> bool:
    """Whether a process group exists."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def is_first_rank() -> bool:
    """Whether this process writes what is written once."""
    import torch.distributed as dist

    return not torch_distributed() or dist.get_rank() == 0


def of_all_ranks(act: Callable[[], T], group: Any = None) -> list[T]:
    """What `act` returns on each rank, in their order; when it fails on any of them, an error on all.

    Raises:
        RankError: what failed first, by rank; in a single process the error itself.
    """
    import torch.distributed as dist

    if not torch_distributed():
        return [act()]
    value, error = None, None
    try:
        value = act()
    except Exception as problem:
        error = problem
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (value, None if error is None else root_cause(error)), group=group)
    for rank, (_, message) in enumerate(answers):
        if message is not None:
            raise RankError(f"rank {rank}: {message}") from error
    return [value for value, _ in answers]


def on_first_rank(act: Callable[[], None], group: Any = None) -> None:
    """`of_all_ranks` for what rank 0 does while the others wait."""
    of_all_ranks(lambda: act() if is_first_rank() else None, group)


def root_cause(error: BaseException) -> str:
    """The message of what failed first, with its rank where an error gathers those of several."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, first = next(iter(sorted(failures.items())))
        cause = root_cause(first[0] if isinstance(first, tuple) else first)
        return f"rank {rank}: {cause}" if torch_distributed() else cause
    return str(error) or type(error).__name__
