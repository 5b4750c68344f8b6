"""Attention: selected per model, through Transformers' attention interface under opslot's names.

The contract is the interface's: `query` [B, heads, S, D], `key` and `value` [B, kv_heads, S_kv, D], `attention_mask`
as the implementation's mask function makes it, `scaling` the factor before softmax; returns ([B, S, heads, D], None).
Packed documents are given by `cu_seq_lens_q` / `cu_seq_lens_k` (int32, [documents + 1], over B * S tokens) with
`max_length_q` / `max_length_k`. No document crosses rows. If the last boundary is not B * S, eager code and `sdpa` on
CPU treat the tokens after it as another document; variable-length kernels would leave their outputs uninitialized,
and reject them (on a GPU by a device-side assertion).

Cross attention (keys of an encoder's states) is not causal. Where keys have padding, a kernel gets a mask, or the other
keys alone with `cu_seq_lens_k` that differs from `cu_seq_lens_q`: `masks.reads_layout`. Calls that are cross attention
are marked by the class's form, since as many queries as keys can be either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opslot._base.errors import KernelError
from opslot.ops._common.documents import (
    assert_separated,
    continued_at,
    given_arguments,
    has_cache,
    masks_drop_positions,
    positions_of_documents,
    positions_restart,
)
from opslot.ops._common.model_config import head_sizes
from opslot.ops.attention.calls import CU_SEQLENS
from opslot.ops.attention.cases import CASES, benchmark_case
from opslot.ops.attention.compressed_reference import reference as compressed_reference
from opslot.ops.attention.reference import OPTIONS, causal_of, reference, unpack_bits
from opslot.slots import BoundKernel, Cost, OpSpec, OpVariant, SlotBinding
from opslot.slots.protocol import (
    ATTENTION_PREFIX,
    attention_options,
    attention_skip,
    cu_seqlens_for_flash,
    is_own_attention,
    keeps_itself,
    masks_ignore_positions,
    masks_of,
    modules_by_document,
    padding_read_outside,
    reads_padding,
)


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """In forward the matmuls of scores and output; in backward the scores again and a gradient of each operand."""
    q, k, v = (arguments[name] for name in ("query", "key", "value"))
    bytes_moved = (4 * q.numel() + 6 * k.numel()) * q.element_size()
    return Cost(bytes_moved, flops=2 * _visible_pairs(arguments) * (4 * q.shape[-1] + 3 * v.shape[-1]))


def _visible_pairs(arguments: Mapping[str, Any]) -> int:
    """Pairs of a query and a key that it sees, over all rows and heads."""
    batch, heads, length, _ = arguments["query"].shape
    bits, cu_seqlens = arguments.get("selected_bits"), arguments.get("cu_seq_lens_q")
    if bits is not None:
        seen = unpack_bits(bits, arguments["key"].shape[2])
        return int(seen.sum()) * heads // (seen.shape[1] if seen.dim() == 4 else 1)
    causal = causal_of(arguments["module"], arguments)
    window, keys = arguments.get("sliding_window"), arguments["key"].shape[2]
    if not causal and cu_seqlens is None and keys != length:
        return batch * heads * length * keys
    lengths = [length] * batch if cu_seqlens is None else cu_seqlens.diff().tolist()
    # The first queries of a document see fewer keys than a window has.
    windows = [(n, min(n, window or n)) for n in lengths]
    earlier = heads * sum(n * seen - seen * (seen - 1) // 2 for n, seen in windows)
    return earlier if causal else 2 * earlier - heads * sum(lengths)


def _compressed_cost(arguments: Mapping[str, Any]) -> Cost:
    """Two matmuls in forward and five in backward, over the keys that the last query sees at most."""
    q, k, keys = arguments["query"], arguments["key"], arguments.get("compressed_keys", 0)
    batch, heads, length, width = q.shape
    selected = arguments.get("selected")
    if selected is not None:
        # Indices, or counts of visible keys, which are half of them on average.
        keys = min(keys, selected.shape[2]) if selected.dim() == 3 else keys / 2
    seen = min(length, arguments.get("sliding_window") or length) + keys
    bytes_moved = (4 * q.numel() + 3 * k.numel()) * q.element_size()
    return Cost(bytes=bytes_moved, flops=int(14 * batch * heads * length * seen * width))


def _applies_to(model: Any) -> str | None:
    """The variant of the attention modules that use the config of `model`; None where it has none.

    A model that only wraps others, such as a vision-language model, has none.
    """
    can_set = getattr(type(model), "_can_set_attn_implementation", None)
    if can_set is None or not hasattr(model, "config") or not can_set():
        return None
    modules = _modules_of(model)
    variants = {found[0] for m in modules if (found := attention_options(m)) is not None}
    if not variants and not any(attention_skip(m) or _is_unknown_attention(m) for m in modules):
        return None
    return next((name for name in ("bidirectional", "compressed", "indexed") if variants == {name}), "causal")


def _is_unknown_attention(module: Any) -> bool:
    """Attention of a class that is not generated may read the implementation of its config."""
    cls = type(module)
    return "Attention" in cls.__name__ and not cls.__module__.startswith("opslot.")


# What Transformers selects by default; anything else was set by the user.
_DEFAULTS = (None, "sdpa", "eager")


def _keeps(model: Any, attached: _Attached | None, wanted: str) -> str | None:
    """Why a model keeps its attention: its class is not generated, its config asks for weights, or under "auto" the
    user selected one."""
    if type(model).__module__.startswith("transformers."):
        return f"{type(model).__name__} has no generated class, so what its attention computes is unknown"
    reason = skipped_attention(_modules_of(model))
    if reason:
        return reason
    if getattr(model.config, "output_attentions", False):
        return "its config has output_attentions=True, and kernels do not return the weights of attention"
    own = model.config._attn_implementation
    if attached is not None and own == attached.set_to:
        own = attached.previous
    if wanted == "auto" and own not in _DEFAULTS and not is_own_attention(own):
        return f"the model was built with Transformers' {own!r}, which auto keeps"
    return None


def skipped_attention(modules: Iterable[Any]) -> str | None:
    """The class of the first of some modules with attention that has no kernels, and why; None where all have them."""
    skips = ((type(module).__name__, attention_skip(module)) for module in modules)
    return next((f"{name} {why}" for name, why in skips if why), None)


def _reject_documents(model: Any, args: Any, kwargs: dict[str, Any], by_position: bool = False) -> None:
    """Forward pre-hook of a model that keeps Transformers' attention: raise for packed documents that it would mix.

    FlashAttention reads their boundaries; masks of other implementations are made of positions that restart.

    Args:
        by_position: whether masks separate documents by their positions.
    """
    implementation = str(model.config._attn_implementation)
    given = given_arguments(model, args, kwargs)
    packed_by = "cu_seq_lens_q"
    if kwargs.get("cu_seq_lens_q") is None:
        if not (reason := masks_ignore_positions(model)) or not positions_restart(model, given, reason):
            return
        packed_by = "position_ids that restart"
    if "flash" in implementation:
        return
    mask = given.get("attention_mask")
    why, found, first = skipped_attention(_modules_of(model)), f"Transformers' {implementation} ignores {packed_by}", ""
    if by_position and given.get("position_ids") is not None:
        if isinstance(mask, Tensor) and mask.dim() == 2:
            # Of rows that are padded: Transformers does not look at positions.
            found, first = f"{found}, and position_ids where it gets an attention_mask", "leave out attention_mask, or "
        elif mask is not None:
            return
        elif has_cache(given) or given.get("use_cache"):
            found, first = f"{found}, and position_ids where it fills a cache", "leave out use_cache, or "
        else:
            token = _not_separated(model, given)
            if token is None:
                return
            found = f"{found}, and position_ids do not restart at token {token}, where a document starts"
            first = "pass position_ids [B, S] that restart at each document, or "
    raise KernelError(
        f"{type(model).__name__} cannot keep packed documents ({packed_by}) apart",
        found=f"{why}, and {found}" if why else found,
        hint=(
            first
            + ("" if why else "bind a kernel of attention, e.g. attn_implementation: sdpa, or ")
            + "pass each document in a row of its own, padded, with an attention_mask"
        ),
    )


def _reject_unseparated_documents(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """`_reject_documents` where masks separate documents by their positions.

    Not a partial of it: torch.compile of torch 2.11 guards its arguments under the index of another hook, and fails.
    """
    _reject_documents(model, args, kwargs, by_position=True)


def _not_separated(model: Any, given: Mapping[str, Any]) -> int | None:
    """The first token of `cu_seq_lens_q` at which positions do not separate documents; None where all do.

    A compiled model asserts that.
    """
    positions, cu_seqlens = positions_of_documents(given), given["cu_seq_lens_q"]
    if torch.compiler.is_compiling():
        assert_separated(model, positions, cu_seqlens, given["position_ids"].shape[-1])
        return None
    if positions is not None:
        return continued_at(positions, cu_seqlens)
    inner = cu_seqlens[(cu_seqlens > 0) & (cu_seqlens < given["position_ids"].shape[-1])]
    return int(inner[0]) if len(inner) else None


def _reject_mixed_documents(model: Any) -> Any:
    """Register `_reject_documents` on a model that keeps Transformers' attention; returns its hook, or None."""
    if any(True for _ in modules_by_document(model)):
        return None
    variants = {found[0] for module in _modules_of(model) if (found := attention_options(module)) is not None}
    # Masks that hide later tokens are made of positions too; others are of padding alone.
    ignored = masks_ignore_positions(model) or masks_drop_positions(model)
    by_position = "bidirectional" not in variants and not keeps_itself(model) and not ignored
    hook = _reject_unseparated_documents if by_position else _reject_documents
    return model.register_forward_pre_hook(hook, with_kwargs=True)


class _Attached(NamedTuple):
    """The attention implementation of a config before it was bound, the one that was set then, and a hook or None."""

    previous: str | None
    set_to: str | None
    hook: Any = None


def _attach(model: Any, slots: Sequence[SlotBinding], kernel: Callable[..., Any] | None) -> _Attached:
    """Set the implementation on the model's config, but not on its sub-configs."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from opslot.ops.attention import masks

    (slot,) = slots
    previous = model.config._attn_implementation
    if kernel is None:
        # Transformers' code: with the preset what the model has, else that whose masks it reads, or "eager" if named.
        needed = None if slot.resolution.by_preset else next(filter(None, map(masks_of, _modules_of(model))), None)
        state = _set(model, needed or ("eager" if slot.resolution.names_eager else previous))
        return state._replace(hook=_reject_mixed_documents(model))
    mask_function: Any = getattr(kernel, "mask_function", None)
    if mask_function is None:
        raise KernelError(
            f"attn_implementation={slot.resolution.chosen!r}: the kernel has no attribute mask_function, so "
            "that no mask can be made for it",
            hint="set it to the function that makes its masks, e.g. transformers.masking_utils.sdpa_mask",
        )
    chosen = slot.resolution.chosen
    falls_back = not slot.resolution.explicit and not masks.applies_any(mask_function)
    falls_back = getattr(mask_function, "falls_back", falls_back)
    at_padding, of_encoders = (None, None) if slot.wrappers else (reads_padding(model), padding_read_outside(model))
    if not slot.wrappers:
        # An indexer reads documents and padding of its mask as those of a kernel.
        indexed = slot.resolution.variant == "indexed"
        mask_function = masks.MaskFunction(
            mask_function,
            chosen,
            falls_back=falls_back,
            at_padding=at_padding,
            at_padding_of_encoders=of_encoders,
            any_layout=indexed,
        )
        kernel = masks.reads_layout(kernel, dense if falls_back else None)
    # Transformers treats a name with "flash" as its own kernel, which it gives padded values and no chunks.
    shown = chosen.replace("flash", "fa")
    if slot.resolution.variant == "bidirectional" and any(map(cu_seqlens_for_flash, _modules_of(model))):
        shown += CU_SEQLENS
    if slot.resolution.variant == "compressed":
        # Of the same name for other variants, but another function.
        shown += "_compressed"
    wrappers = (re.sub(r"\W+", "_", wrapper.name.lower()) for wrapper in slot.wrappers)
    suffixes = [*(["or_dense"] if falls_back else []), *([f"at_{at_padding}_padding"] if at_padding else [])]
    suffixes += [f"at_{of_encoders}_padding_of_encoders"] if of_encoders else []
    name = ATTENTION_PREFIX + "_".join([shown, *suffixes, *wrappers])
    bound = BoundKernel(OP.name, slot.resolution.variant, chosen, slot.resolution.explicit, kernel, slot.path)
    AttentionInterface.register(name, bound.as_function())
    AttentionMaskInterface.register(name, mask_function)
    return _set(model, name)


def _modules_of(model: Any) -> list[nn.Module]:
    """The modules with a model's own config, not that of a model in it."""
    return [m for m in model.modules() if m.__dict__.get("config") is model.config]


def dense(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """Attention with a dense mask, for kernels that take none."""
    from opslot.ops.attention.sdpa import sdpa

    options = any(kwargs.get(option) is not None for option in OPTIONS)
    return (reference if options else sdpa)(module, query, key, value, mask, **kwargs)


def _set(model: Any, name: str | None) -> _Attached:
    previous = model.config._attn_implementation
    for config in _configs_of(model):
        # The property would set it on the configs of sub-models too.
        config._attn_implementation_internal = name
    return _Attached(previous, name)


def _configs_of(model: Any) -> list[Any]:
    """The config of a model, and those that copies of its layers got with them (`copy.deepcopy(layers[3])`).

    The copies get the model's masks. Other modules may have a config of the same class and attention of their own.
    """
    known = {type(module) for module in _modules_of(model)}
    copied: dict[int, list[Any]] = {}
    modules = [*model.children()]
    while modules:
        module = modules.pop()
        config = module.__dict__.get("config")
        if type(config) is type(model.config) and config is not model.config:
            if hasattr(type(module), "_can_set_attn_implementation"):
                # A model inside, which makes masks with its own config.
                continue
            copied.setdefault(id(config), []).append(module)
        modules.extend(module.children())
    holders = (found for found in copied.values() if known.issuperset(map(type, found)))
    return [model.config, *(found[0].config for found in holders)]


def _detach(model: Any, state: _Attached) -> None:
    """Undo `_attach`, unless another implementation was set on the model since."""
    if state.hook is not None:
        state.hook.remove()
    for config in _configs_of(model):
        if config._attn_implementation == state.set_to:
            config._attn_implementation_internal = state.previous


def _variant(name: str, description: str) -> OpVariant:
    compressed = name == "compressed"
    return OpVariant(
        name,
        compressed_reference if compressed else reference,
        CASES[name],
        ("query", "key", "s_aux" if compressed else "value"),
        _compressed_cost if compressed else _cost,
        # torch's fused CPU attention approximates exp with an error of 20 ULP.
        tolerance_ulps={"float32": 8},
        static_shape=head_sizes,
        benchmark_case=benchmark_case if name == "causal" else None,
        description=description,
    )


OP = OpSpec(
    name="attention",
    config_field="attn_implementation",
    description="scaled dot-product attention, selected per model and sub-model",
    variants={
        "causal": _variant("causal", "causal, grouped heads, packed documents"),
        "bidirectional": _variant("bidirectional", "of encoders and towers, packed documents"),
        "indexed": _variant("indexed", "causal, to the keys that an indexer selects (DeepSeek-V3.2, GLM-5, Qwen4)"),
        "compressed": _variant("compressed", "causal in a window and to compressed keys, with sinks (DeepSeek-V4)"),
    },
    applies_to=_applies_to,
    part=lambda module: attention_options(module) is not None or attention_skip(module) is not None,
    attach=_attach,
    detach=_detach,
    keeps=_keeps,
    runs=lambda model: model.config._attn_implementation,
)
