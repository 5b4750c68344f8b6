"""A model on several processes: attention over whole sequences, experts of all ranks, FSDP2 around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from opslot._base.errors import ConfigError, KernelError
from opslot.distributed import (
    ExpertParallel,
    ParallelPlan,
    ParallelState,
    gather_outputs,
    get_parallel_state,
    parallelize,
    ulysses_attention,
)
from opslot.distributed.ulysses import kv_repeats
from opslot.models._registry import ARCHITECTURES
from opslot.ops.attention.op import PREFIX as ATTENTION_PREFIX
from opslot.slots import KERNEL_REGISTRY, BoundKernel, bind, bound_config, own_config, walk_slots

_SUFFIX = "_ulysses"


def parallelize_model(
    model: Any, state: ParallelState | None = None, *, ulysses_pipeline: int = 1, **options: Any
) -> Any:
    """Make `model`, whose kernels are bound, compute the same over the ranks of `state`; in place.

    Its kernels are bound anew for the dtype and device that it will compute in, where those are not its parameters'.

    Args:
        model: built by `build_foundation_model`, or prepared by `opslot.apply`.
        state: default `get_parallel_state()`.
        ulysses_pipeline: parts that a rank's heads are taken in under sequence parallelism; see `ulysses_attention`.
        options: of `opslot.distributed.parallelize`: param_dtype, activation_checkpointing, load, ...

    Raises:
        ConfigError: heads or experts that the sizes do not divide, experts that the architecture does not have.
    """
    state = state or get_parallel_state()
    config, dtype = bound_config(model), options.get("param_dtype")
    if config is not None and dtype is not None:
        bind(model, config, device=state.device, dtype=dtype)
    plan = parallel_plan(model)
    if state.ep > 1:
        if plan is None:
            raise ConfigError(
                f"ep={state.ep}, but {model.config.model_type} has no parallel plan for experts\n"
                "  to do: set ep to 1, or add parallel_plan.py to the architecture's folder"
            )
        _spread_experts(model)
    if state.sp > 1:
        _spread_sequences(model, state, ulysses_pipeline)
    head = _set_head_apart(model) if state.mesh is not None else None
    return parallelize(model, state, plan=plan, head=head, **options)


def parallel_plan(model: Any) -> ParallelPlan | None:
    """The parallel plan of the model's architecture, or None when it has nothing to divide."""
    architecture = ARCHITECTURES.get(model.config.model_type)
    return architecture.parallel_plan(model) if architecture is not None else None


def _slot(name: str) -> str:
    return f"_opslot_{name}"


def _kernel_of(module: nn.Module, slot: str, op_name: str, variant: str) -> Callable[..., Any]:
    """What is bound; for eager the op's reference, a function of the arguments alone."""
    bound = module.__dict__.get(_slot(slot))
    return bound if bound is not None else KERNEL_REGISTRY.op(op_name).variant(variant).reference


def _spread_experts(model: Any) -> None:
    for path, module, slot, op_name, variant in walk_slots(model):
        if op_name != "moe_experts":
            continue
        check_site = KERNEL_REGISTRY.op(op_name).variant(variant).check_site
        problem = check_site(module) if check_site else None
        if problem:
            raise ConfigError(f"{path} cannot be divided among ep ranks: {problem}\n  to do: set ep to 1")
        if not isinstance(module.__dict__.get(_slot(slot)), ExpertParallel):
            module.__dict__[_slot(slot)] = ExpertParallel(_kernel_of(module, slot, op_name, variant))


def _spread_sequences(model: Any, state: ParallelState, pipeline: int) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own_config(model)
    config = model.config.get_text_config()
    kv_repeats(config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads), state.sp)
    name = model.config._attn_implementation
    if _SUFFIX in name:
        return
    if name == "eager":
        kernel = KERNEL_REGISTRY.op("attention").variant("causal").reference
    elif name.startswith(ATTENTION_PREFIX):
        kernel = ALL_ATTENTION_FUNCTIONS[name]
    else:
        raise ConfigError(
            f"sequence parallelism needs one of opslot's attention kernels, the model uses Transformers' {name!r}\n"
            "  to do: build it with opslot, or call opslot.apply first"
        )
    spread = f"{name}{_SUFFIX}{pipeline}"
    AttentionInterface.register(spread, ulysses_attention(_over_documents(kernel), pipeline=pipeline))
    # Masks are made from the part of the sequence that a rank holds; documents of the whole come as cu_seq_lens.
    AttentionMaskInterface.register(spread, _no_mask)
    model.config._attn_implementation = spread
    for _, module, slot, op_name, variant in walk_slots(model):
        if op_name == "load_balancing_loss":
            module.__dict__[_slot(slot)] = _OverWholeSequences(_kernel_of(module, slot, op_name, variant))


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


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


class _OverWholeSequences:
    """A load-balancing loss of all tokens of the rows, each rank's router knowing a part of them."""

    def __init__(self, kernel: Callable[..., Tensor]) -> None:
        self.kernel = kernel

    def __call__(self, gate_logits: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(gate_logits, tuple):
            gate_logits = tuple(gather_outputs(logits, 0) for logits in gate_logits)
        return self.kernel(gate_logits, *args, **kwargs)


def _over_documents(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` with documents and sliding windows from cu_seq_lens alone."""
    mask_function = getattr(getattr(kernel, "mask_function", None), "__name__", "")
    knows_windows = mask_function == "flash_attention_mask"

    @functools.wraps(kernel)
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        window = kwargs.get("sliding_window")
        if window is not None and not knows_windows:
            if mask_function == "flex_attention_mask":
                raise KernelError(
                    "attn_implementation='flex_attention' has no sliding windows under sequence parallelism; use sdpa"
                )
            attention_mask = _window_mask(query, kwargs, window)
            kwargs = {name: value for name, value in kwargs.items() if not name.startswith("cu_seq_lens")}
        return kernel(module, query, key, value, attention_mask, **kwargs)

    return attend


def _window_mask(query: Tensor, kwargs: dict[str, Any], window: int) -> Tensor:
    """[B, 1, S, S] bool: same document, not later, at most `window` - 1 tokens earlier."""
    batch, _, length, _ = query.shape
    position = torch.arange(batch * length, device=query.device)
    distance = position[:length, None] - position[:length]
    mask = (distance >= 0) & (distance < window)
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if cu_seqlens is None:
        return mask.expand(batch, 1, -1, -1)
    document = torch.searchsorted(cu_seqlens[1:].long(), position, right=True).view(batch, 1, length)
    return mask & (document[..., :, None] == document[..., None, :])
