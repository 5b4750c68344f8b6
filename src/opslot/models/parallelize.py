"""Parallelize a model: Ulysses sequence parallelism, expert parallelism, and FSDP2 or DDP around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from opslot._base.errors import ConfigError
from opslot._base.logging import get_logger
from opslot.checkpoint.model_tensors import unread_experts
from opslot.distributed import ExpertParallel, ParallelPlan, ParallelState, get_parallel_state, shard_model
from opslot.distributed.fsdp import MODE_OPTIONS, needs_fsdp
from opslot.distributed.mixed_precision import has_copies
from opslot.distributed.parallelized import check_not_parallelized
from opslot.models._adapters.experts import mark_adapted_experts, with_expert_adapters
from opslot.models._adapters.linear import fuse_linear_adapters
from opslot.models._adapters.nf4 import with_quantized_experts
from opslot.models._cuda_graphs import prepare_cuda_graphs
from opslot.models._layer_drop import run_dropped_layers
from opslot.models._multimodal.conditional import add_zero_of_skipped_modules, transformers_model
from opslot.models._multimodal.host_inputs import (
    keep_inputs_from_fsdp,
    map_inputs_of_compiled_layers,
    reads_host_inputs,
)
from opslot.models._multimodal.modalities import alias_outputs, encode_in_forward, find_towers
from opslot.models._own_loss import averages_its_own_labels, is_share_of_loss
from opslot.models._registry import architecture_of
from opslot.models._sequence.ulysses import prepare_ulysses, with_ulysses
from opslot.slots import KERNEL_REGISTRY, Binding, binding_of, resolve, walk_slots, write
from opslot.slots.binding import Wrapper, class_name, wrapper_of
from opslot.slots.protocol import modules_by_document, removed_experts, replaced_forward

__all__ = ["parallel_plan", "parallelize"]

logger = get_logger(__name__)


def parallelize(
    model: Any,
    state: ParallelState | None = None,
    *,
    plan: ParallelPlan | None = None,
    ulysses_pipeline: int = 1,
    ulysses_overlap: bool = False,
    cuda_graphs: bool = False,
    **options: Any,
) -> Any:
    """Parallelize `model` in place over the device mesh of `state`: Ulysses over sp, experts over ep, data over dp.

    Gradients are summed over ranks, so a rank's loss is its share of the global loss: call the model with
    `shard_sequence(batch)` and `num_items_in_batch`, a tensor with the number of labels of the step over all ranks.

    Kernels are selected again where `param_dtype` is another dtype than the parameters'. Binding the model later
    (`opslot.bind`, a move to another device) keeps everything that is applied here.

    Args:
        model: built by `build_foundation_model`, or prepared by `opslot.apply`; it may be inside a wrapper such as
            PEFT's.
        state: default `get_parallel_state()`.
        plan: which parameters are sharded over ep; default `parallel_plan(model)`.
        ulysses_pipeline: chunks that a rank's heads are exchanged in; see `ulysses_attention`.
        ulysses_overlap: start the all-to-all of query, key and value each while the next one is projected; the same
            numbers, bit for bit where sp does not make it repeat key/value heads. Excludes a pipeline.
        cuda_graphs: run each layer through torch.compile and replay it as CUDA graphs, for small models and short
            batches, whose steps wait for the host; without FSDP2, sp, ep and activation checkpointing. A forward pass
            overwrites what the last one returned, and no backward pass of that one may follow.
        options: of `opslot.distributed.shard_model`: data_parallel_mode (FSDP2, or all parameters on each rank),
            param_dtype, reduce_dtype, activation_checkpointing, compile, load, cpu_offload, ...

    Returns:
        `model`.

    Raises:
        ConfigError: heads or experts that sp or ep does not divide, experts that the architecture does not have or that
            the plan leaves out, an attention whose projections cannot overlap, a model that is parallelized already.
    """
    # Before kernels are bound.
    check_not_parallelized(model)
    if ulysses_overlap and ulysses_pipeline != 1:
        raise ConfigError(
            f"ulysses_overlap exchanges all heads at once, so they cannot be taken in {ulysses_pipeline} chunks",
            hint="set ulysses_pipeline to 1, or ulysses_overlap to False",
        )
    state = state or get_parallel_state()
    plan = plan or parallel_plan(model)
    is_sharded = needs_fsdp(model, state, **{name: options[name] for name in MODE_OPTIONS if name in options})
    if cuda_graphs:
        _check_cuda_graphs(model, state, is_sharded, options)
        options |= {"compile": True, "compile_mode": "reduce-overhead"}
    head = _separate_head(model) if is_sharded else None
    _bind_parallel(model, state, plan, is_sharded, ulysses_pipeline, ulysses_overlap, dtype=options.get("param_dtype"))
    if state.sp == 1 and state.world_size > 1:
        model.register_forward_pre_hook(_warn_of_local_means, with_kwargs=True)
    # Ranks that hold all parameters run different towers, unless ranks of a sequence encode each other's images.
    has_collectives = state.world_size > 1 and (is_sharded or state.sp > 1)
    towers = find_towers(model) if has_collectives else None
    model = shard_model(
        model,
        state,
        plan=plan,
        head=head,
        with_root=towers.with_root if towers is not None else (),
        **options,
    )
    if is_sharded:
        keep_inputs_from_fsdp(model)
    if is_sharded or has_copies(model):
        encode_in_forward(model)
    map_inputs_of_compiled_layers(model)
    if cuda_graphs:
        prepare_cuda_graphs(model)
    if towers is not None:
        run_dropped_layers(model, state)
        add_zero_of_skipped_modules(model)
        towers.run_on_every_rank(model)
    if is_sharded:
        alias_outputs(model)
    return model


def _check_cuda_graphs(model: Any, state: ParallelState, is_sharded: bool, options: dict[str, Any]) -> None:
    device = next(model.parameters()).device
    device = state.device if device.type == "meta" else device
    problems = {
        f"graphs replay on a GPU, and the model is on {device}": device.type != "cuda",
        "the parameters of FSDP2 move": is_sharded,
        f"they cannot hold the collectives of sp={state.sp} and ep={state.ep}": state.sp > 1 or state.ep > 1,
        "layers that are computed again in backward free the graphs' inputs": options.get("activation_checkpointing")
        not in (None, False, "none"),
        "each image or audio has another shape": reads_host_inputs(model),
    }
    found = next((problem for problem, is_given in problems.items() if is_given), None)
    if found is not None:
        raise ConfigError(
            "cuda_graphs: layers cannot be replayed as CUDA graphs", found=found, hint="set compile instead"
        )


def _bind_parallel(
    model: Any,
    state: ParallelState,
    plan: ParallelPlan | None,
    is_sharded: bool,
    pipeline: int,
    overlap: bool,
    dtype: torch.dtype | None,
) -> None:
    """Select kernels again for parameters in `dtype`, and wrap them in parallelism, adapters and quantization."""
    bound = binding_of(model)
    if bound is None:
        if state.sp > 1 or state.ep > 1:
            raise ConfigError(
                f"{type(model).__name__} has no kernels bound, which sp={state.sp} and ep={state.ep} need",
                hint="build it with opslot.build_foundation_model, or call opslot.apply first",
            )
        return
    root, binding = bound
    mark_adapted_experts(root)
    device = state.device if state.mesh is not None else _runs_on(root, binding)
    binding = resolve(root, binding.config, device=device, dtype=dtype or binding.dtype)
    # Wrappers are added innermost first.
    if state.ep > 1:
        _check_experts(model, state, plan)
        _remove_unread_experts(model)
        binding = with_expert_parallel(binding)
    if state.sp > 1:
        prepare_ulysses(root, binding, state, overlap)
        binding = with_ulysses(root, binding, pipeline, overlap)
    fuse_linear_adapters(root, binding.config)
    binding = with_quantized_experts(with_expert_adapters(binding, root), root)
    if is_sharded:
        # FSDP gathers the weight of the head in its forward.
        in_head = Wrapper("in the head's FSDP group", _loss_in_head)
        binding = binding.with_wrappers(lambda slot: in_head if slot.op.name == "cross_entropy_loss" else None)
    write(root, binding)


def _runs_on(model: nn.Module, binding: Binding) -> torch.device | str:
    """The device of the parameters; if they are on meta, the one that the model was bound for."""
    first = next(model.parameters()).device
    return binding.device.torch_type if first.type == "meta" else first


def parallel_plan(model: Any) -> ParallelPlan | None:
    """The plan of the model's own `get_parallel_plan`, else its architecture's plan; None when there is neither.

    Args:
        model: a Transformers model, or a wrapper around one, such as PEFT's.
    """
    inner = transformers_model(model)
    path = next(path for path, module in model.named_modules() if module is inner)
    if hasattr(inner, "get_parallel_plan"):
        return inner.get_parallel_plan().below(path)
    # A class of the user's own may derive from a generated one.
    found = (architecture_of(cls, generated=True) for cls in type(inner).__mro__)
    architecture = next((a for a in found if a is not None), None)
    plan = (architecture.plan or _experts_in_slots)(inner) if architecture is not None else None
    return plan.below(path) if plan is not None else None


def _experts_in_slots(model: Any) -> ParallelPlan | None:
    """All weights of experts that have slots, sharded along their first dimension, which has one entry per expert."""
    weights = [
        f"{path}.{name}" if path else name
        for path, module, _, op, _ in walk_slots(model)
        if op == "moe_experts"
        for name, _ in module.named_parameters(recurse=False)
    ]
    return ParallelPlan(extra_parallel_plan={"ep": dict.fromkeys(weights, Shard(0))}) if weights else None


def _warn_of_local_means(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: gradients are summed over ranks, so each rank's loss must be its share of the global one."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    has_loss = kwargs.get("labels") is not None and not kwargs.get("return_log_probs")
    if not has_loss or is_share_of_loss():
        return
    if averages_its_own_labels(transformers_model(model)):
        _warn_once(class_name(model), "its loss ignores num_items_in_batch", "multiply it by its share of the labels")
    elif kwargs.get("num_items_in_batch") is None:
        hint = "pass num_items_in_batch, a tensor: the labels of all ranks"
        _warn_once(class_name(model), "was called with labels but without num_items_in_batch", hint)


@functools.cache
def _warn_once(name: str, reason: str, hint: str) -> None:
    logger.warning(
        "%s is trained on several ranks and %s, so each rank's loss is the mean over its own tokens, and the gradients "
        "are the sum of theirs; %s",
        name,
        reason,
        hint,
    )


def with_expert_parallel(binding: Binding) -> Binding:
    """The binding with each kernel of experts called for the tokens of all ranks."""
    wrapper = wrapper_of("expert parallel", ExpertParallel)
    return binding.with_wrappers(lambda slot: wrapper if slot.op.name == "moe_experts" else None)


def _check_experts(model: Any, state: ParallelState, plan: ParallelPlan | None) -> None:
    experts = [slot for slot in walk_slots(model) if slot.op_name == "moe_experts"]
    if not experts:
        raise ConfigError(
            f"ep={state.ep}, but {model.config.model_type} has no experts", hint="set ep (train.ep_size) to 1"
        )
    if plan is None:
        raise ConfigError(
            f"ep={state.ep}, but {model.config.model_type} has no parallel plan for its experts",
            hint="set ep to 1, pass plan=ParallelPlan(...), or give the model a method get_parallel_plan",
        )
    sharded = plan.match(model)
    by_document = [outer for outer, _ in modules_by_document(model)]
    for path, module, _, op_name, variant in experts:
        if outer := next((outer for outer in by_document if path.startswith(f"{outer}.")), None):
            raise ConfigError(
                f"{path} cannot be sharded over ep ranks: {outer} runs once for each packed document, and ranks have "
                "different numbers of documents",
                hint="set ep to 1",
            )
        if problem := replaced_forward(module):
            raise ConfigError(f"{path} cannot be sharded over ep ranks: {problem}", hint="set ep to 1")
        # A kernel would pair a rank's shard of one tensor with the wrong experts of another that is not sharded.
        missing = [name for name, _ in module.named_parameters(path, recurse=False) if name not in sharded]
        if missing:
            raise ConfigError(
                f"ep={state.ep}, but the parallel plan does not shard {', '.join(missing)}",
                hint="name every parameter of the experts in it",
            )
        check_module = KERNEL_REGISTRY.op(op_name).variant(variant).check_module
        if check_module and (problem := check_module(module)):
            raise ConfigError(f"{path} cannot be sharded over ep ranks: {problem}", hint="set ep to 1")


def _remove_unread_experts(model: Any) -> None:
    """Remove the experts that nothing reads, so that the shards of all weights of a module hold the same experts."""
    for _, module, _, op_name, _ in walk_slots(model):
        unread = unread_experts(module) if op_name == "moe_experts" else {}
        for name, count in unread.items():
            weight = module.get_parameter(name)
            module.register_parameter(name, nn.Parameter(weight.detach()[:-count].clone(), weight.requires_grad))
        if unread:
            removed_experts.set(module, unread)


class _Head(nn.Linear):
    """An output head whose forward can also run a loss that reads its parameters, which FSDP gathers there alone."""

    def forward(self, hidden_states: Tensor, loss: Callable[..., Any] | None = None) -> Any:
        return super().forward(hidden_states) if loss is None else loss(hidden_states, self.weight, self.bias)


def _loss_in_head(
    module: Any, kernel: Callable[..., Any] | None, reference: Callable[..., Any]
) -> Callable[..., Any] | None:
    """A fused linear + loss kernel inside the forward of its head, where the head may be an FSDP group."""
    head = module.get_output_embeddings()
    return _LossInHead(kernel, head) if kernel is not None and isinstance(head, _Head) else kernel


class _LossInHead:
    """A fused linear + loss kernel that runs inside the forward of its head."""

    def __init__(self, kernel: Any, head: nn.Linear) -> None:
        self.kernel = kernel
        self.head = head
        # What `head` was before its forward could run a loss.
        self._linear = nn.Linear(1, 1, bias=False, device="meta")

    def __call__(
        self, hidden_states: Tensor, weight: Tensor, labels: Tensor | None, *, bias: Tensor | None = None, **kwargs: Any
    ) -> Any:
        # The arguments `weight` and `bias` are shards, but for a bias that the model itself adds to its logits.
        added = None if bias is None or self.head.bias is not None else bias

        def loss(x: Tensor, w: Tensor, b: Tensor | None) -> Any:
            return self.kernel(x, w, labels, bias=b if added is None else added.to(w.dtype), **kwargs)

        return self.head(hidden_states, loss=loss)

    def __repr__(self) -> str:
        return f"<in the head {self.kernel!r}>"

    def can_serve(self, model: Any, head: Any, *around: Any) -> bool:
        return head is self.head and self.kernel.can_serve(model, self._linear, *around)

    def other_variant(self, variant: str) -> _LossInHead:
        return _LossInHead(self.kernel.other_variant(variant), self.head)


def _separate_head(model: Any) -> nn.Module | None:
    """The output head, ready to be an FSDP group; None where its weight is tied or it is not a plain Linear."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if type(head) is not nn.Linear:
        return None
    if any(
        sum(p is own for m in model.modules() for p in m.parameters(recurse=False)) > 1 for own in head.parameters()
    ):
        return None
    head.__class__ = _Head
    return head
