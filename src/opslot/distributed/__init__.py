"""Several processes: who shares what, sequence and expert parallelism, FSDP2, gradient norms."""

from opslot.distributed.parallel_state import (
    ParallelState,
    destroy_parallel_state,
    get_parallel_state,
    init_parallel_state,
)

__all__ = [
    "ParallelState",
    "destroy_parallel_state",
    "get_parallel_state",
    "init_parallel_state",
]
