"""A model on several processes: attention over whole sequences, experts of all ranks, FSDP2 around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from opslot._base.device import has_package
from opslot._base.errors import ConfigError
from opslot._base.logging import get_logger
from opslot.distributed import ExpertParallel, ParallelPlan, ParallelState, get_parallel_state, parallelize
from opslot.models._registry import architecture_of
from opslot.models._sequence import kernel_of, spread_sequences, whole_sequences
from opslot.slots import KERNEL_REGISTRY, BoundKernel, bind, bound_config, walk_slots

__all__ = ["parallel_plan", "parallelize_model", "whole_sequences"]

logger = get_logger(__name__)


def parallelize_model(
    model: Any,
    state: ParallelState | None = None,
    *,
    plan: ParallelPlan | None = None,
    ulysses_pipeline: int = 1,
    ulysses_overlap: bool = False,
    **options: Any,
) -> Any:
    """Make `model`, whose kernels are bound, compute the same over the ranks of `state`; in place.

    Ranks add up their gradients, so a rank's loss is its share of the whole: call the model with
    `shard_sequence(batch)` and `num_items_in_batch`, a tensor with the number of labels of the step over all ranks.

    Its kernels are bound anew for the dtype and device that it will compute in, where those are not its parameters'.

    Args:
        model: built by `build_foundation_model`, or prepared by `opslot.apply`.
        state: default `get_parallel_state()`.
        plan: what ep divides; default `parallel_plan(model)`.
        ulysses_pipeline: parts that a rank's heads are taken in under sequence parallelism; see `ulysses_attention`.
        ulysses_overlap: under sequence parallelism, send query, key and value each while the next one is projected; the
            same numbers, bit for bit where sp does not make it repeat key/value heads. Excludes a pipeline.
        options: of `opslot.distributed.parallelize`: param_dtype, activation_checkpointing, load, ...

    Raises:
        ConfigError: heads or experts that the sizes do not divide, experts that the architecture does not have or that
            the plan leaves out, an attention whose projections cannot overlap, a model that is spread already.
    """
    if isinstance(model, FSDPModule):
        raise ConfigError(
            f"{type(model).__name__} is spread over ranks already",
            hint="build it again to spread it otherwise, and call parallelize_model once",
        )
    if ulysses_overlap and ulysses_pipeline != 1:
        raise ConfigError(
            f"ulysses_overlap sends all heads at once, so they cannot be taken in {ulysses_pipeline} parts",
            hint="set ulysses_pipeline to 1, or ulysses_overlap to False",
        )
    state = state or get_parallel_state()
    config, dtype = bound_config(model), options.get("param_dtype")
    if config is not None and dtype is not None:
        bind(model, config, device=state.device, dtype=dtype)
    plan = plan or parallel_plan(model)
    if state.ep > 1:
        if not any(op_name == "moe_experts" for _, _, _, op_name, _ in walk_slots(model)):
            raise ConfigError(
                f"ep={state.ep}, but {model.config.model_type} has no experts",
                hint="set ep to 1",
            )
        if plan is None:
            raise ConfigError(
                f"ep={state.ep}, but {model.config.model_type} has no parallel plan for its experts",
                hint="set ep to 1, pass plan=ParallelPlan(...), or give the model a method get_parallel_plan",
            )
        _spread_experts(model, state, plan)
    if state.sp > 1:
        spread_sequences(model, state, ulysses_pipeline, ulysses_overlap)
    elif state.world_size > 1:
        model.register_forward_pre_hook(_notice_means, with_kwargs=True)
    head = _set_head_apart(model) if state.mesh is not None else None
    return parallelize(model, state, plan=plan, head=head, add=_sum_of_parts(state.device), **options)


def parallel_plan(model: Any) -> ParallelPlan | None:
    """What the model's own `get_parallel_plan` says, else its architecture's plan; None when there is neither.

    Args:
        model: a Transformers model, or a wrapper around one, such as PEFT's.
    """
    path, inner = _transformers_model(model)
    if hasattr(inner, "get_parallel_plan"):
        return inner.get_parallel_plan().below(path)
    # A class of the user's own may derive from a generated one.
    found = (architecture_of(cls, generated=True) for cls in type(inner).__mro__)
    architecture = next((a for a in found if a is not None), None)
    plan = architecture.parallel_plan(inner) if architecture is not None else None
    return plan.below(path) if plan is not None else None


def _notice_means(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: ranks' gradients are added up, so their losses should be shares of one."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    if kwargs.get("labels") is not None and kwargs.get("num_items_in_batch") is None:
        _warn_of_means(type(model).__name__.removeprefix("FSDP"))


@functools.cache
def _warn_of_means(name: str) -> None:
    logger.warning(
        "%s is trained on several ranks and was called with labels but without num_items_in_batch, so each rank's loss "
        "is the mean over its own tokens, and the gradients are the sum of theirs; pass num_items_in_batch, a tensor: "
        "the labels of all ranks",
        name,
    )


def _transformers_model(model: nn.Module) -> tuple[str, Any]:
    """The outermost Transformers model in `model`, after its path."""
    from transformers import PreTrainedModel

    return next(((path, m) for path, m in model.named_modules() if isinstance(m, PreTrainedModel)), ("", model))


def _slot(name: str) -> str:
    return f"_opslot_{name}"


def _spread_experts(model: Any, state: ParallelState, plan: ParallelPlan) -> None:
    add, divided = _row_sum(state.device), plan.match(model)
    for path, module, slot, op_name, variant in walk_slots(model):
        if op_name != "moe_experts":
            continue
        # A kernel would pair a rank's part of one tensor with the wrong experts of another that is whole.
        whole = [name for name, _ in module.named_parameters(path, recurse=False) if name not in divided]
        if whole:
            raise ConfigError(
                f"ep={state.ep}, but the parallel plan leaves {', '.join(whole)} whole",
                hint="name every parameter of the experts in it",
            )
        check_module = KERNEL_REGISTRY.op(op_name).variant(variant).check_module
        problem = check_module(module) if check_module else None
        if problem:
            raise ConfigError(
                f"{path} cannot be divided among ep ranks: {problem}",
                hint="set ep to 1",
            )
        if not isinstance(module.__dict__.get(_slot(slot)), ExpertParallel):
            module.__dict__[_slot(slot)] = ExpertParallel(kernel_of(module, slot, op_name, variant), add=add)


def _row_sum(device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """What adds up rows that came back from other ranks: a kernel on GPUs, else None, which stands for plain torch."""
    if device.type != "cuda" or not has_package("triton"):
        return None
    from opslot.ops.moe_experts.row_sum import sum_rows

    return sum_rows


def _sum_of_parts(device: torch.device) -> Callable[[Tensor, Tensor, int, Tensor], None] | None:
    """What adds up the ranks' gradients where these are copied: a kernel on GPUs, else None, as above."""
    if device.type != "cuda" or not has_package("triton"):
        return None
    from opslot.ops._common.sum_parts import sum_parts

    return sum_parts


class _Head(nn.Linear):
    """An output head whose forward can also run a loss that reads its weight, which FSDP gathers there alone."""

    def forward(self, hidden_states: Tensor, loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        return super().forward(hidden_states) if loss is None else loss(hidden_states, self.weight)


class _LossInHead:
    """A fused linear + loss kernel that runs inside the forward of its head."""

    def __init__(self, kernel: BoundKernel, head: nn.Linear) -> None:
        self.kernel = kernel
        self.head = head
        # What `head` was before its forward could run a loss.
        self._linear = nn.Linear(1, 1, bias=False, device="meta")

    def __call__(self, hidden_states: Tensor, weight: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        return self.head(hidden_states, loss=lambda x, whole: self.kernel(x, whole, labels, **kwargs))

    def __repr__(self) -> str:
        return f"<in the head {self.kernel!r}>"

    def serves_head(self, model: Any, head: Any) -> bool:
        return head is self.head and self.kernel.serves_head(model, self._linear)


def _set_head_apart(model: Any) -> nn.Module | None:
    """The output head, ready to be a group of its own; None where it shares its weight or is more than a product."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if type(head) is not nn.Linear or head.bias is not None:
        return None
    if sum(p is head.weight for m in model.modules() for p in m.parameters(recurse=False)) > 1:
        return None
    for _, module, slot, op_name, _ in walk_slots(model):
        bound = module.__dict__.get(_slot(slot))
        if op_name == "cross_entropy_loss" and bound is not None:
            module.__dict__[_slot(slot)] = _LossInHead(bound, head)
    head.__class__ = _Head
    return head
