"""Ulysses sequence parallelism of a model: ranks hold shards of sequences, and attention gets the global ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers.masking_utils import sdpa_mask

from opslot._base.errors import ConfigError, ParallelError
from opslot.distributed import (
    ParallelState,
    ShardedConvolution,
    UlyssesDeltaRule,
    UlyssesScan,
    gather_outputs,
    get_parallel_state,
    has_features,
    slice_input_tensor,
    ulysses_attention,
)
from opslot.distributed.recurrence import HEADS, SCAN_HEADS
from opslot.distributed.ulysses import OverlappedAllToAll, kv_repeats
from opslot.models._multimodal.modalities import computes_features_inside, decoder_of
from opslot.models._multimodal.sequence import has_whole_sequences, shard_at_decoder
from opslot.models._own_loss import averages_its_own_labels, keeps_labels_in_place
from opslot.ops._common.documents import given_arguments, has_cache
from opslot.ops.attention import masks
from opslot.ops.attention.op import dense
from opslot.slots import Binding, SlotBinding, Wrapper, walk_slots
from opslot.slots.binding import class_name, wrapper_of
from opslot.slots.protocol import keeps_sequences, runs_on_global_sequences, takes_earlier_tokens

# The variant of attention whose queries stay on their rank, which gathers the tokens before them.
_COMPRESSED = "compressed"
# The variant of a convolution with its gates, of which another slot of the module has the convolution alone.
_GATED = "gated"


def with_ulysses(model: Any, binding: Binding, pipeline: int = 1, overlap: bool = False) -> Binding:
    """The binding of `model`, prepared by `prepare_ulysses`, for ranks that hold shards of sequences.

    Towers compute whole images, so their slots stay as they are.

    Raises:
        ConfigError: a `pipeline` for a model without attention whose heads ranks exchange.
    """
    decoder = _decoder_path(model)
    if pipeline > 1 and not any(_is_by_heads(slot) and _is_inside(decoder, slot) for slot in binding.slots):
        raise ConfigError(
            f"ulysses_pipeline={pipeline} has no effect on {type(model).__name__}, which has no attention whose heads "
            "the ranks exchange",
            hint="set ulysses_pipeline to 1",
        )
    name = "Ulysses" if pipeline == 1 else f"Ulysses in {pipeline} chunks"

    def wrapper(slot: SlotBinding) -> Wrapper | None:
        if slot.op.name == "load_balancing_loss":
            return wrapper_of("gathered router logits", _OverGlobalSequences)
        if not _is_inside(decoder, slot):
            return None
        if _is_by_heads(slot):
            return wrapper_of(name, functools.partial(_on_some_heads, pipeline, slot.resolution.explicit))
        if slot.op.name == "attention":
            return wrapper_of("earlier tokens of all ranks", _on_earlier_tokens)
        if (slot.op.name, slot.resolution.variant) == ("rotary_pos_emb", "full"):
            return _OVERLAPPED if overlap else None
        if slot.resolution.variant == _GATED:
            return _LEFT_OUT if slot.op.name == "causal_conv1d" else None
        return _RECURRENCES.get(slot.op.name)

    return binding.with_wrappers(wrapper)


def _is_by_heads(slot: SlotBinding) -> bool:
    """Whether a slot is of attention that is computed for some heads on each rank."""
    return slot.op.name == "attention" and slot.resolution.variant != _COMPRESSED


def prepare_ulysses(model: Any, binding: Binding, state: ParallelState, overlap: bool = False) -> None:
    """Check that sequences of `model` can be sharded, and register the hooks that this needs.

    Raises:
        ConfigError: heads that sp does not divide, attention that opslot does not select, a language model that
            contains encoders, or projections that cannot overlap.
    """
    decoder = decoder_of(model)
    attention = [slot for slot in binding.of("attention") if _is_inside(_decoder_path(model), slot)]
    why = keeps_sequences(decoder or model, by_kernel=True)
    why = why or next((slot.kept for slot in attention if slot.kept), None)
    recurrences = [slot for op_name in _RECURRENCES for slot in binding.of(op_name)]
    if not attention and not recurrences:
        why = why or "it has no attention that opslot can select"
    if computes_features_inside(model):
        why = why or "it places features of images or audio in sequences inside its language model"
    to_earlier_tokens = (module for module in model.modules() if takes_earlier_tokens(module))
    if any(_largest_position_matters(part) for module in to_earlier_tokens for part in module.modules()):
        why = why or "frequencies of keys depend on the largest position, which a rank does not have"
    if keeps_labels_in_place(model):
        why = why or f"the labels of shards are shifted, and its loss ({model.loss_type}) compares them in place"
    if why:
        raise ConfigError(
            f"sequences of {type(model).__name__} cannot be sharded (sp={state.sp}): {why}",
            hint="set sp_size to 1",
        )
    repeats = _kv_repeats(model, state) if any(map(_is_by_heads, attention)) else {1}
    _check_recurrences(model, state)
    # Rotary embeddings whose frequencies depend on the largest position see the positions of all ranks.
    _add_hooks(decoder or model, _largest_position_matters, _gather_positions, _shard_cos_sin)
    if overlap:
        _overlap_projections(decoder or model, repeats)
    if decoder is not None:
        shard_at_decoder(model, decoder)
    # Modules that mix tokens, and may run on global sequences, get those of all ranks, and return this rank's.
    _add_hooks(decoder or model, runs_on_global_sequences, _gather_tokens, _own_tokens)
    model.register_forward_pre_hook(_require_positions, with_kwargs=True)


def _decoder_path(model: Any) -> str:
    """The path of the language model in a model with towers; "" for a model without."""
    decoder = decoder_of(model)
    return "" if decoder is None else next(path for path, module in model.named_modules() if module is decoder)


def _is_inside(path: str, slot: SlotBinding) -> bool:
    return not path or slot.path == path or slot.path.startswith(f"{path}.")


def _on_some_heads(pipeline: int, explicit: bool, attention: Any) -> Any:
    """An attention kernel of which each rank computes some heads of global sequences.

    Args:
        pipeline: chunks that a rank's heads are exchanged in.
        explicit: the user named the kernel, so that no other one serves the masks that it cannot apply.
    """
    own = getattr(attention, "mask_function", sdpa_mask)
    falls_back = not explicit and not masks.applies_any(own)
    wrapped: Any = ulysses_attention(masks.reads_layout(attention, dense if falls_back else None), pipeline=pipeline)
    name = getattr(attention, "__name__", "attention")
    wrapped.mask_function = _MaskFunction(masks.MaskFunction(own, name, falls_back=falls_back))
    return wrapped


def _on_earlier_tokens(kernel: Any) -> Any:
    """An attention kernel that gets a rank's queries and the keys of these and of earlier tokens."""
    attention = masks.reads_layout(kernel)

    # The attributes of a function of its own.
    @functools.wraps(attention)
    def attend(*args: Any, **kwargs: Any) -> Any:
        return attention(*args, **kwargs)

    joined: Any = attend
    joined.joins_shards, joined.mask_function = True, masks.local_mask_function
    return joined


@dataclass(frozen=True)
class _MaskFunction:
    """Masks of global sequences, before the language model shards them, and of a rank's shard of them.

    Attributes:
        whole: the kernel's, for global sequences.
    """

    whole: masks.MaskFunction

    @property
    def falls_back(self) -> bool:
        """Whether another kernel serves masks that this one cannot apply."""
        return self.whole.falls_back

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.whole if has_whole_sequences() else masks.local_mask_function)(*args, **kwargs)


def _overlapped_rotary(
    module: Any, kernel: Callable[..., Any] | None, reference: Callable[..., Any]
) -> Callable[..., Any] | None:
    """A rotary embedding that waits for the all-to-all of queries and keys."""
    all_to_all = OverlappedAllToAll.of(module)
    return kernel if all_to_all is None else _OverlappedRotary(kernel or reference, all_to_all)


def _without_kernel(module: Any, kernel: Callable[..., Any] | None, reference: Callable[..., Any]) -> None:
    """No kernel: the slots of what this one fuses run."""


_OVERLAPPED = Wrapper("overlapped projections", _overlapped_rotary)
_LEFT_OUT = Wrapper("left out on sharded sequences", _without_kernel)
_RECURRENCES = {
    "causal_conv1d": wrapper_of("sharded sequences", ShardedConvolution),
    "chunk_gated_delta_rule": wrapper_of("Ulysses", UlyssesDeltaRule),
    "mamba_chunk_scan": wrapper_of("Ulysses", UlyssesScan),
}


def _require_positions(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: require what a rank cannot derive from its shard of the sequences.

    Raises:
        ParallelError: no position_ids, labels that the model would shift or average within the shard, or what only
            `generate` passes.
    """
    given = given_arguments(model, args, kwargs)
    kept = given.get("logits_to_keep")
    if has_cache(given) or not (kept is None or (isinstance(kept, int) and kept == 0)):
        raise ParallelError(
            f"{class_name(model)} holds shards of sequences (sp > 1), and each rank would continue its own shard",
            found=f"{'a cache' if has_cache(given) else 'logits_to_keep'}, which generate passes",
            hint="generate with a model that is parallelized with sp=1, or with an inference engine",
        )
    needed = {} if has_features(given) else {"position_ids": "each rank would count from 0"}
    if given.get("labels") is not None:
        needed["shift_labels"] = "the last token of each shard would have no label"
        if not given.get("return_log_probs"):
            needed["num_items_in_batch"] = "each rank would average over its own tokens"
    if given.get("labels") is not None and averages_its_own_labels(model):
        raise ParallelError(
            f"{class_name(model)} of this Transformers release computes the loss from its own labels, without "
            "shift_labels and num_items_in_batch, so with sp > 1 it would be wrong",
            hint="use a newer release of Transformers or sp_size 1, or compute the loss from the logits",
        )
    lacking = next((name for name in needed if given.get(name) is None), None)
    if lacking is not None:
        raise ParallelError(
            f"{class_name(model)} holds shards of sequences (sp > 1) and was called without "
            f"{lacking}, so {needed[lacking]}",
            hint=(
                "call it with **opslot.distributed.shard_sequence(batch), and with labels also "
                "with num_items_in_batch, a tensor: the labels of all ranks"
            ),
        )


def _kv_repeats(model: Any, state: ParallelState) -> set[int]:
    """How often the layers repeat each key/value head."""
    config = model.config.get_text_config()
    # Layers may have different numbers of heads.
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    heads = [(own.num_attention_heads, getattr(own, "num_key_value_heads", own.num_attention_heads)) for own in layers]
    return {kv_repeats(*counts, state.sp) for counts in heads}


def _check_recurrences(model: Any, state: ParallelState) -> None:
    """Raise ConfigError for recurrences whose heads sp does not divide."""
    for _, module, _, op_name, variant in walk_slots(model):
        if op_name == "chunk_gated_delta_rule":
            # Kimi delta attention has as many key heads as value heads.
            heads = getattr(module, "num_v_heads", None) or module.num_heads
            kv_repeats(heads, getattr(module, "num_k_heads", heads), state.sp, HEADS)
        elif op_name == "mamba_chunk_scan" and variant == "per_channel":
            kv_repeats(module.intermediate_size, 1, state.sp, ("scan channels", "B and C"))
        elif op_name == "mamba_chunk_scan":
            # Lightning attention has a group per head.
            heads = getattr(module, "num_heads", None) or module.num_attention_heads
            kv_repeats(heads, getattr(module, "n_groups", heads), state.sp, SCAN_HEADS)


@dataclass(eq=False)
class _OverGlobalSequences:
    """A load-balancing loss over global sequences; each rank's router has the logits of its shard."""

    kernel: Callable[..., Tensor]

    def __call__(
        self,
        gate_logits: Any,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        if isinstance(gate_logits, tuple):
            gate_logits = tuple(gather_outputs(logits, 0) for logits in gate_logits)
        if attention_mask is not None:
            # In the order of the logits: rank by rank.
            tokens = gate_logits[0].shape[0] if isinstance(gate_logits, tuple) else 0
            is_whole = attention_mask.numel() == tokens
            parts = attention_mask.chunk(get_parallel_state().sp, 1) if is_whole else None
            attention_mask = gather_outputs(attention_mask, 0) if parts is None else torch.cat(parts)
        return self.kernel(gate_logits, num_experts, top_k, attention_mask)


def _add_hooks(
    model: nn.Module, is_meant: Callable[[nn.Module], bool], before: Callable[..., Any], after: Callable[..., Any]
) -> None:
    """Register a forward pre-hook and a forward hook on each of the modules that are meant."""
    for module in model.modules():
        if is_meant(module):
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after)


def _gather_tokens(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Forward pre-hook: tensors [B, S, ...] of [B, S / sp, ...]. Masks of padding are those of tokens."""
    if get_parallel_state().sp == 1:
        return None
    states = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim() > 2)
    rows, length = states.shape[:2]

    def gather(x: Any) -> Any:
        is_shard = isinstance(x, Tensor) and x.dim() > 1 and x.shape[:2] == (rows, length)
        return gather_outputs(x, 1) if is_shard else x

    # Transformers makes no mask of a shard without padding, whatever the other ranks have.
    masks = {
        name: states.new_ones(rows, length, dtype=torch.bool) if x is None else x.bool()
        for name, x in kwargs.items()
        if "mask" in name
    }
    return tree_map(gather, (args, {**kwargs, **masks}))


def _own_tokens(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Forward hook: this rank's tokens of [B, S, ...]."""
    return slice_input_tensor(output, 1)


def _largest_position_matters(module: Any) -> bool:
    """Whether a module is a rotary embedding whose frequencies depend on the largest position."""
    types = getattr(module, "rope_type", None)
    names = types.values() if isinstance(types, dict) else (types,)
    return any(isinstance(name, str) and ("dynamic" in name or name == "longrope") for name in names)


def _gather_positions(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: position_ids [..., S] of the global sequence."""
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": gather_outputs(kwargs["position_ids"], -1)}
    return (args[0], gather_outputs(args[1], -1), *args[2:]), kwargs


def _shard_cos_sin(module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook: this rank's shard [..., S / sp, D] of cosine and sine, or of one tensor of both."""
    return tree_map(lambda x: slice_input_tensor(x, -2), output)


def _overlap_projections(model: Any, repeats: set[int]) -> None:
    """Start the all-to-all of query, key and value as soon as each is projected."""
    if len(repeats) > 1:
        raise ConfigError(
            f"ulysses_overlap: the layers of {type(model).__name__} repeat key/value heads "
            f"{' or '.join(map(str, sorted(repeats)))} times",
            hint="set ulysses_overlap to False",
        )
    (times_of_kv,) = repeats
    attentions = list(_projecting(model))
    rotations = [m for name, m in model.named_modules() if name.rpartition(".")[2] == "rotary_emb"]
    if not attentions or not rotations:
        raise ConfigError(
            f"ulysses_overlap: {type(model).__name__} has no attention with q_proj, k_proj, "
            "v_proj and a slot rotary_pos_emb after them, with cos and sin from a module "
            "rotary_emb",
            hint="set ulysses_overlap to False",
        )
    for module in attentions:
        all_to_all = OverlappedAllToAll()
        all_to_all.attach(module)
        for name, times in (("query", 1), ("key", times_of_kv), ("value", times_of_kv)):
            _last_of(module, name[0]).register_forward_hook(
                functools.partial(_start_all_to_all, all_to_all, name, module.head_dim, times)
            )
    for rotation in rotations:
        rotation.register_forward_hook(_gather_cos_sin)


def _projecting(model: Any) -> Iterator[Any]:
    """Attention modules whose projections can overlap with their all-to-all."""
    for _, module, _, op_name, variant in walk_slots(model):
        projects = all(isinstance(getattr(module, f"{x}_proj", None), nn.Module) for x in "qkv")
        if (op_name, variant) == ("rotary_pos_emb", "full") and projects and hasattr(module, "head_dim"):
            yield module


def _last_of(module: Any, letter: str) -> nn.Module:
    """The last module that a projection passes through before rotary embedding."""
    norm = getattr(module, f"{letter}_norm", None)
    return norm if isinstance(norm, nn.Module) else getattr(module, f"{letter}_proj")


def _start_all_to_all(
    all_to_all: OverlappedAllToAll, name: str, head_dim: int, repeats: int, module: nn.Module, args: Any, output: Tensor
) -> Tensor:
    """Forward hook: `output` [B, S / sp, heads, D] or [B, S / sp, heads * D]."""
    if output.dim() == 4:
        return all_to_all.start(name, output, repeats)
    return all_to_all.start(name, output.unflatten(-1, (-1, head_dim)), repeats).flatten(-2)


def _gather_cos_sin(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Forward hook: cosine and sine [B, S, D] of the global sequence."""
    return tuple(gather_outputs(x, 1) for x in output)


@dataclass(eq=False)
class _OverlappedRotary:
    """A rotary embedding of queries and keys whose all-to-all has not finished."""

    kernel: Callable[..., Any]
    all_to_all: OverlappedAllToAll

    def __call__(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return self.kernel(self.all_to_all.wait("query", query), self.all_to_all.wait("key", key), cos, sin)
