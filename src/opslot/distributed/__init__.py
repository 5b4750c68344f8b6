"""Device meshes, FSDP2 and DDP, sequence and expert parallelism, gradient norms, and ranks that fail together."""

from opslot.distributed.consensus import (
    fail_together,
    gather_objects,
    is_first_rank,
    on_all_ranks,
    on_first_rank,
    sum_over_ranks,
    wait_for_ranks,
)
from opslot.distributed.dummy import dummy_forward
from opslot.distributed.expert_parallel import ExpertParallel
from opslot.distributed.fsdp import gradient_sync, shard_model
from opslot.distributed.gradient_norm import clip_grad_norm
from opslot.distributed.offload import offload, reload
from opslot.distributed.parallel_plan import ParallelPlan
from opslot.distributed.parallel_state import (
    ParallelState,
    check_sizes,
    destroy_parallel_state,
    get_parallel_state,
    init_parallel_state,
)
from opslot.distributed.recurrence import ShardedConvolution, UlyssesDeltaRule, UlyssesScan
from opslot.distributed.running_statistics import average_statistics, keep_frozen_statistics
from opslot.distributed.sequence import has_features, shard_sequence
from opslot.distributed.ulysses import (
    gather_heads_scatter_seq,
    gather_outputs,
    gather_seq_scatter_heads,
    slice_input_tensor,
    sp_pad_and_slice,
    ulysses_attention,
    unpad_tensor,
)

__all__ = [
    "ExpertParallel",
    "ParallelPlan",
    "ParallelState",
    "ShardedConvolution",
    "UlyssesDeltaRule",
    "UlyssesScan",
    "average_statistics",
    "check_sizes",
    "clip_grad_norm",
    "destroy_parallel_state",
    "dummy_forward",
    "fail_together",
    "gather_heads_scatter_seq",
    "gather_objects",
    "gather_outputs",
    "gather_seq_scatter_heads",
    "get_parallel_state",
    "gradient_sync",
    "has_features",
    "init_parallel_state",
    "is_first_rank",
    "keep_frozen_statistics",
    "offload",
    "on_all_ranks",
    "on_first_rank",
    "reload",
    "shard_model",
    "shard_sequence",
    "slice_input_tensor",
    "sp_pad_and_slice",
    "sum_over_ranks",
    "ulysses_attention",
    "unpad_tensor",
    "wait_for_ranks",
]
