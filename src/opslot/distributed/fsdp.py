"""Data parallelism of a model. FSDP2: sharded layer by layer, experts within their ep rank. DDP: whole on each rank.

The loss of a rank is the sum over its tokens divided by the number of tokens of the whole step, and gradients are
summed over the ranks instead of averaged. So a step equals that of one process on the whole batch, for any mesh, for
dense parameters and experts, and with different numbers of tokens per rank.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from opslot._base.errors import ConfigError
from opslot.distributed.activations import (
    CheckpointingMode,
    checkpoint_activations,
    keep_fsdp_from_checkpoints,
)
from opslot.distributed.copy_engine import CopyReduceScatter, use_copies
from opslot.distributed.fsdp_layers import find_layers
from opslot.distributed.kept_parameters import keep_in_float32, policy_of
from opslot.distributed.mixed_precision import (
    can_copy_parameters,
    compute_with_copies,
    replicate,
    replicated_gradient_sync,
    takes_little_memory,
)
from opslot.distributed.module_dtypes import compute_in_dtype, kept_in_float32
from opslot.distributed.parallel_plan import ParallelPlan
from opslot.distributed.parallel_state import ParallelState, get_parallel_state
from opslot.distributed.parallelized import check_not_parallelized

DataParallelMode = Literal["auto", "ddp", "fsdp2"]
# Gathered parameters that a forward pass keeps for its backward pass, of the GPU's memory.
_KEPT = 0.1
# What `needs_fsdp` depends on.
MODE_OPTIONS = ("data_parallel_mode", "param_dtype", "cpu_offload", "reshard_after_forward", "copy_engine")
_REDUCTIONS = "_fsdp_reductions"


def shard_model(
    model: nn.Module,
    state: ParallelState | None = None,
    *,
    plan: ParallelPlan | None = None,
    layers: Collection[str] | None = None,
    head: nn.Module | None = None,
    with_root: Collection[nn.Module] = (),
    data_parallel_mode: DataParallelMode = "auto",
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
    activation_checkpointing: CheckpointingMode | bool = False,
    activation_offload: bool = False,
    compile: bool = False,
    compile_mode: str | None = None,
    cpu_offload: bool = False,
    reshard_after_forward: bool | None = None,
    prefetch: int = 1,
    copy_engine: bool | None = None,
    load: Callable[[nn.Module], Any] | None = None,
) -> nn.Module:
    """Shard `model` over the ranks, in place. Slots keep their kernels: bind before or after.

    A model that is small for the GPU stays whole on each rank instead (`data_parallel_mode`): it computes with copies
    of its parameters in `param_dtype`, and its gradients are all-reduced.

    With FSDP2, each layer is one parameter group. The experts that `plan` names are their own group, sharded on dim 1
    over the ranks that hold the same experts. The root's group has the remaining parameters: it is unsharded during the
    model's forward and reduced last. `head`, if given, is its own group instead.

    Args:
        model: on any device, with the same values on every rank; or on meta, then give `load`.
        state: default `get_parallel_state()`.
        plan: parameters that ep shards.
        layers: class names of the layers; default Transformers' `_no_split_modules`.
        head: module that follows the last layer. Its parameters are gathered during that layer's forward and reduced
            during its backward, but unsharded only inside the module's own forward.
        with_root: modules in which no layer is a separate group, such as those that only some ranks run.
        data_parallel_mode: ddp or fsdp2; auto is ddp in one process if copies in `param_dtype` take at most 5 % of the
            GPU's memory, and in several if the parameters do and no other option needs FSDP2.
        param_dtype: dtype of the computation, as in MixedPrecisionPolicy; default the parameters'. The optimizer keeps
            the parameters' dtype, and so do computations with those that Transformers keeps in float32.
        reduce_dtype: dtype in which gradients are accumulated.
        activation_checkpointing: none, full or selective; see `opslot.distributed.activations`. True is full.
        activation_offload: keep the inputs of checkpointed layers in host memory.
        compile: run each layer through torch.compile; layers of one class share its graphs.
        compile_mode: `mode` of torch.compile.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.
        reshard_after_forward: gather a layer's parameters again for the backward pass instead of keeping them; default
            True, but not for a model whose gathered parameters take at most 10 % of the GPU's memory.
        prefetch: number of layers whose parameters are gathered ahead.
        copy_engine: gather and reduce by copies between the GPUs of one host instead of NCCL's kernels; default where
            possible. See `opslot.distributed.copy_engine`.
        load: called with the sharded model to allocate and fill meta parameters,
            e.g. `lambda model: load_weights(model, folder)`.

    Returns:
        `model`.

    Raises:
        ConfigError: a model that is parallelized already, no layers, a plan that does not fit, trainable parameters of
            several dtypes in one group, or options that need several processes or FSDP2.
    """
    check_not_parallelized(model)
    state = state or get_parallel_state()
    is_sharded = needs_fsdp(
        model,
        state,
        data_parallel_mode=data_parallel_mode,
        param_dtype=param_dtype,
        cpu_offload=cpu_offload,
        reshard_after_forward=reshard_after_forward,
        copy_engine=copy_engine,
    )
    if is_sharded and state.mesh is None:
        raise ConfigError(
            "fsdp2, cpu_offload, and param_dtype of a model that is large for this device need FSDP, which needs a "
            "process group",
            hint="call init_parallel_state(group_of_one=True) first, start with torchrun, or use torch.autocast",
        )
    dtype = param_dtype if is_sharded else None
    if param_dtype is not None:
        compute_in_dtype(model, param_dtype)
    checkpoint_activations(model, activation_checkpointing, activation_offload, dtype)
    if compile:
        # Before FSDP, whose hooks stay outside of the graphs.
        for layer in find_layers(model, layers):
            layer.compile(mode=compile_mode)
    experts = plan.apply(model, state) if plan is not None else []
    if is_sharded:
        options = {
            "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=True),
            "offload_policy": CPUOffloadPolicy(pin_memory=state.device.type == "cuda")
            if cpu_offload
            else OffloadPolicy(),
        }
        inside = {part for module in with_root for part in module.modules()}
        blocks = [layer for layer in find_layers(model, layers) if layer not in inside]
        expert_modules = [model.get_submodule(path) for path in experts] if state.ep > 1 else []
        whole_experts: list[nn.Module] = []
        if not cpu_offload and _can_keep_experts(expert_modules, state, param_dtype):
            expert_modules, whole_experts = [], expert_modules
        if reshard_after_forward is None:
            reshard_after_forward = not _keeps_gathered(model, param_dtype, state.device)
        options["ignored_params"] = _whole_weights(model) | set(_own_parameters(whole_experts)) or None
        groups = _shard(model, state, blocks, expert_modules, head, reshard_after_forward, options)
        if activation_checkpointing == "selective":
            keep_fsdp_from_checkpoints(model)
        _set_prefetch(model, groups, prefetch)
        reductions = use_copies(_shard_groups(model, state, expert_modules), state.device, copy_engine)
        model.__dict__[_REDUCTIONS] = _Reductions(reductions, param_dtype)
        if whole_experts and param_dtype is not None:
            compute_with_copies(model, param_dtype, whole_experts)
    elif state.world_size > 1:
        # Ranks of a sequence exchange heads in the backward pass, where gradients may be ready in different orders.
        replicate(model, param_dtype, reduce_dtype, overlap=state.sp == 1)
    elif param_dtype is not None:
        compute_with_copies(model, param_dtype)
    if load is not None:
        load(model)
    _check_memory(model)
    if is_sharded:
        model.register_forward_hook(_reshard_without_grad)
        _check_dtypes(model)
        _gather_once(model)
    return model


def _reshard_without_grad(model: nn.Module, args: Any, output: Any) -> None:
    """Forward hook: shard what FSDP leaves gathered for a backward pass that does not come.

    Clipping and new optimizers would get the gathered parameters, and the next forward pass values before a step.
    """
    if torch.is_grad_enabled():
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def needs_fsdp(
    model: nn.Module,
    state: ParallelState,
    *,
    data_parallel_mode: DataParallelMode = "auto",
    param_dtype: torch.dtype | None = None,
    cpu_offload: bool = False,
    reshard_after_forward: bool | None = None,
    copy_engine: bool | None = None,
) -> bool:
    """Whether `shard_model` with these options uses FSDP2.

    Raises:
        ConfigError: an unknown mode, or ddp with an option that needs FSDP2.
    """
    mode = data_parallel_mode
    if mode not in get_args(DataParallelMode):
        raise ConfigError(
            f"unknown data_parallel_mode={mode!r}", hint=f"use one of {', '.join(get_args(DataParallelMode))}"
        )
    needs = {
        f"dp_replicate={state.dp_replicate}": state.dp_replicate > 1,
        f"ep={state.ep}": state.ep > 1,
        "cpu_offload": cpu_offload,
        f"reshard_after_forward={reshard_after_forward}": reshard_after_forward is not None,
        "copy_engine": bool(copy_engine),
    }
    found = [name for name, is_given in needs.items() if is_given]
    if mode == "ddp":
        if found:
            raise ConfigError(
                "data_parallel_mode is ddp, in which each rank holds all parameters",
                found=f"{', '.join(found)}, which FSDP2 alone supports",
                hint="set data_parallel_mode to fsdp2, or remove the others",
            )
        return False
    if mode == "fsdp2" or cpu_offload:
        return True
    if state.world_size > 1:
        return bool(found) or not _is_small(model, state.device)
    return param_dtype is not None and not can_copy_parameters(model.parameters(), param_dtype, state.device)


def _can_keep_experts(experts: list[nn.Module], state: ParallelState, param_dtype: torch.dtype | None) -> bool:
    """Whether a rank's experts need no FSDP, which would only copy parameters and gradients: no other rank has a shard
    or a copy of them, and their copies in `param_dtype` take little of the GPU's memory.
    """
    if state.ep_fsdp * state.dp_replicate > 1:
        return False
    return param_dtype is None or can_copy_parameters(_own_parameters(experts), param_dtype, state.device)


def _own_parameters(modules: list[nn.Module]) -> Iterator[nn.Parameter]:
    return (parameter for module in modules for parameter in module.parameters(recurse=False))


def _is_small(model: nn.Module, device: torch.device) -> bool:
    """Whether all parameters that FSDP2 would shard, and so their gradients too, take little of a GPU's memory."""
    whole = _whole_weights(model)
    held = sum(p.numel() * p.itemsize for p in model.parameters() if p not in whole)
    return device.type == "cuda" and takes_little_memory(held, device)


def _whole_weights(model: nn.Module) -> set[Any]:
    """Weights that are quantized as they are loaded, which stay whole on each rank."""
    whole: set[Any] = {m.weight for m in model.modules() if hasattr(m, "load_weight")}
    return whole | {getattr(m, name) for m in model.modules() for name in getattr(m, "load_weights", ())}


def _keeps_gathered(model: nn.Module, param_dtype: torch.dtype | None, device: torch.device) -> bool:
    """Whether a model is small for the GPU: gathering its layers again would save little memory.

    On four H200s, a step of 8 layers of Qwen3-30B-A3B's sizes takes 251 ms with it and 238 without, in 6 GiB more.
    """
    gathered = sum(p.numel() * (param_dtype or p.dtype).itemsize for p in model.parameters())
    return device.type == "cuda" and takes_little_memory(gathered, device, _KEPT)


def _gather_once(model: nn.Module) -> None:
    """FSDP's backward without a reduction raises AttributeError for parameters that were never gathered: those of a
    tower before the first image, and those that no forward uses, such as Janus's decoder of images.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


def _check_memory(model: nn.Module) -> None:
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta:
        raise ConfigError(
            f"{len(on_meta)} parameters have no memory, e.g. {on_meta[0]}",
            hint="pass load=..., a function that loads or initializes them, or build the model on a real device",
        )


def _check_dtypes(model: nn.Module) -> None:
    """FSDP flattens the trainable parameters of a group into one tensor."""
    groups = {path for path, module in model.named_modules() if isinstance(module, FSDPModule)}
    found: defaultdict[str, dict[torch.dtype, str]] = defaultdict(dict)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            path = name
            while path not in groups:
                path = path.rpartition(".")[0]
            found[path].setdefault(parameter.dtype, name)
    mixed = next((path for path, dtypes in found.items() if len(dtypes) > 1), None)
    if mixed is not None:
        examples = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in found[mixed].items())
        raise ConfigError(
            f"{mixed or type(model).__name__} has trainable parameters of several dtypes in one FSDP group",
            found=examples,
            hint=(
                "use one dtype (float32, and param_dtype=torch.bfloat16 for the computation), or freeze some of them"
            ),
        )


@contextlib.contextmanager
def gradient_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Inside, backward passes reduce gradients over the ranks only if `enabled`; otherwise they accumulate locally.

    Gradient accumulation disables it for all micro batches except the last.
    """
    if not isinstance(model, FSDPModule):
        with replicated_gradient_sync(model, enabled):
            yield
        return
    reductions = model.__dict__.get(_REDUCTIONS) or _Reductions([], None)
    model.set_requires_gradient_sync(enabled)
    model.set_is_last_backward(enabled)
    try:
        with reductions.of_backward(enabled):
            yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_is_last_backward(True)


class _Reductions:
    """Gradients of a single backward pass are sent in the dtype in which they were computed, sums of several in
    `reduce_dtype`; so are all outside of `gradient_sync`, where it is unknown.
    """

    def __init__(self, reductions: list[CopyReduceScatter], computed: torch.dtype | None) -> None:
        self._reductions, self._computed = reductions, computed
        self._summed = False

    @contextlib.contextmanager
    def of_backward(self, reduced: bool) -> Iterator[None]:
        for reduction in self._reductions:
            reduction.sent_dtype = None if self._summed else self._computed
        try:
            yield
        finally:
            self._summed = not reduced
            for reduction in self._reductions:
                reduction.sent_dtype = None


def _shard(
    model: nn.Module,
    state: ParallelState,
    layers: list[nn.Module],
    experts: list[nn.Module],
    head: nn.Module | None,
    reshard_after_forward: bool,
    options: dict[str, Any],
) -> list[list[nn.Module]]:
    """Bottom-up `fully_shard`; returns, layer by layer and then for the head, the modules whose parameters it needs."""
    policy = options.pop("mp_policy")
    kept = kept_in_float32(model, policy.param_dtype) if policy.param_dtype is not None else set()

    def shard(module: nn.Module, **more: Any) -> None:
        more = {"mesh": state.fsdp_mesh, **options, **more}
        fully_shard(module, mp_policy=policy_of(module, policy, kept), **more)

    _check_expert_shapes(model, experts, state)
    for owner in experts:
        shard(
            owner,
            mesh=state.expert_fsdp_mesh,
            shard_placement_fn=lambda _: Shard(1),
            reshard_after_forward=reshard_after_forward,
        )
    # Innermost first: layers may be nested, and a group takes the parameters that no inner group has.
    for layer in reversed(layers):
        for module in _of_another_dtype(layer, options["ignored_params"] or ()):
            shard(module, reshard_after_forward=reshard_after_forward)
        shard(layer, reshard_after_forward=reshard_after_forward)
    if head is not None:
        # Its backward follows its forward directly.
        shard(head, reshard_after_forward=False)
    shard(model)
    keep_in_float32(model, kept)
    for module in model.modules():
        # In a group of one rank, a divisor would only cost a copy.
        if isinstance(module, FSDPModule) and not (module in experts and state.ep_fsdp * state.dp_replicate == 1):
            module.set_gradient_divide_factor(1.0)
            # A divisor would select PREMUL_SUM, which only NCCL has.
            module.set_force_sum_reduction_for_comms(True)
    inside = {id(module): layer for layer in layers for module in layer.modules() if module in experts}
    groups = [[layer, *(owner for owner in experts if inside.get(id(owner)) is layer)] for layer in layers]
    return groups if head is None else [*groups, [head]]


def _of_another_dtype(layer: nn.Module, ignored: Collection[nn.Parameter]) -> list[nn.Module]:
    """Modules without children whose trained parameters have another dtype than most of a layer, such as routers that
    Transformers keeps in float32: an FSDP group has one dtype.
    """
    elements: Counter[torch.dtype] = Counter()
    found: dict[nn.Module, set[torch.dtype]] = {}
    for module in layer.modules():
        if isinstance(module, FSDPModule):
            continue
        trained = [p for p in module.parameters(recurse=False) if p.requires_grad and p not in ignored]
        for parameter in trained:
            elements[parameter.dtype] += parameter.numel()
        if module is not layer and next(module.children(), None) is None:
            found[module] = {parameter.dtype for parameter in trained}
    most = max(elements, key=elements.__getitem__, default=None)
    return [module for module, dtypes in found.items() if len(dtypes) == 1 and dtypes != {most}]


def _shard_groups(
    model: nn.Module, state: ParallelState, experts: list[nn.Module]
) -> list[tuple[FSDPModule, ProcessGroup]]:
    """FSDP's modules, and the ranks that shard each."""
    found: list[tuple[FSDPModule, ProcessGroup]] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            mesh = state.expert_fsdp_mesh if module in experts else state.fsdp_mesh
            assert mesh is not None, "FSDP shards over meshes"
            # The dp_replicate axis, if there is one, comes first.
            found.append((module, mesh.get_group(mesh.ndim - 1)))
    return found


def _check_expert_shapes(model: nn.Module, experts: list[nn.Module], state: ParallelState) -> None:
    held = {parameter for module in experts for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        if parameter in held and (parameter.dim() < 2 or parameter.shape[1] % state.ep_fsdp):
            raise ConfigError(
                f"{name} of shape {tuple(parameter.shape)} cannot be sharded on dim 1 over "
                f"the {state.ep_fsdp} ranks that ep={state.ep} leaves",
                hint="choose an ep size that leaves a divisor of that dim",
            )


def _set_prefetch(model: Any, groups: list[list[Any]], depth: int) -> None:
    """Set which groups are gathered ahead.

    By default FSDP prefetches only while the host runs ahead of the device, which the dispatch of experts prevents.
    """
    if depth < 1:
        return
    for i, group in enumerate(groups):
        ahead = [module for following in groups[i + 1 : i + 1 + depth] for module in following]
        behind = [module for preceding in reversed(groups[max(0, i - depth) : i]) for module in preceding]
        group[0].set_modules_to_forward_prefetch(ahead)
        group[0].set_modules_to_backward_prefetch(behind)
    model.set_modules_to_forward_prefetch(groups[0])
    model.set_modules_to_backward_prefetch(groups[-1])
