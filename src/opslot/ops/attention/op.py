"""Attention: selected per model, through Transformers' attention interface under opslot's names.

The contract is the interface's: `query` [B, heads, S, D], `key` and `value` [B, kv_heads, S_kv, D], `attention_mask`
as the implementation's mask function makes it, `scaling` the factor before softmax; returns ([B, S, heads, D], None).
Packed documents are given by `cu_seq_lens_q` / `cu_seq_lens_k` (int32, [documents + 1], over B * S tokens) with
`max_length_q` / `max_length_k`. No document crosses rows. If the last boundary is not B * S, eager code and `sdpa` on
CPU treat the tokens after it as another document; variable-length kernels would leave their outputs uninitialized,
and reject them (on a GPU by a device-side assertion).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opslot._base.errors import KernelError
from opslot.ops._common.model_config import head_sizes
from opslot.ops.attention.cases import CASES, benchmark_case
from opslot.slots import Cost, OpSpec, OpVariant, SlotBinding
from opslot.slots.protocol import attention_options, cu_seqlens_for_flash, skip_reason

PREFIX = "opslot_"


def reference(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """softmax(scaling * q k^T + mask) v with grouped key/value heads.

    Without a mask, causal if `is_causal` or else `module.is_causal` is set (the last query sees every key), and limited
    to `sliding_window` tokens. `softcap` caps the scores; `s_aux` [heads] are attention sinks, logits in the softmax
    without a value. The softmax runs in fp32 (fp64 for fp64 input), as Transformers' eager attention does.
    """
    reject_options("eager", kwargs, served=("softcap", "s_aux"))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else 1 / math.sqrt(query.shape[-1]))
    if kwargs.get("softcap") is not None:
        scores = kwargs["softcap"] * torch.tanh(scores / kwargs["softcap"])
    if attention_mask is None or kwargs.get("cu_seq_lens_q") is not None:
        attention_mask = visible(module, query, key, kwargs)
    if attention_mask is not None and attention_mask.is_floating_point():
        scores = scores + attention_mask
    elif attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    dtype = torch.promote_types(scores.dtype, torch.float32)
    sinks = kwargs.get("s_aux")
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1, dtype=dtype)[..., : key.shape[2]].to(query.dtype)
    return (nn.functional.dropout(weights, dropout) @ value).transpose(1, 2).contiguous(), None


def causal_of(module: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Whether this call is causal: `is_causal` of the call, else of the module."""
    causal = kwargs.get("is_causal")
    return getattr(module, "is_causal", True) if causal is None else causal


def window_of(key: Tensor, causal: bool, kwargs: Mapping[str, Any]) -> int | None:
    """`sliding_window` if it masks some key, else None.

    Raises:
        KernelError: a bidirectional window without a mask; models differ in where it ends.
    """
    window = kwargs.get("sliding_window")
    if window is None or window >= key.shape[2]:
        return None
    if not causal:
        raise KernelError(
            f"attention: sliding_window={window} without causality requires an attention_mask",
            hint="pass the mask, or use flash_attention_2, 3 or 4, where it ends window - 1 tokens to either side",
        )
    return window


def visible(module: nn.Module, query: Tensor, key: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Bool mask [B or 1, 1, S, S_kv] of documents, causality and sliding window; None if every key is visible."""
    batch, length, keys = query.shape[0], query.shape[2], key.shape[2]
    causal = causal_of(module, kwargs)
    window = window_of(key, causal, kwargs)
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if cu_seqlens is None and window is None and (not causal or length == 1):
        return None
    position = torch.arange(keys - length, keys, device=query.device)
    distance = position[:, None] - torch.arange(keys, device=query.device)
    mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        mask = mask & (distance < window)
    if cu_seqlens is None:
        return mask[None, None]
    if length != keys:
        raise KernelError(
            f"attention: packed documents of {length} queries and {keys} keys in a row",
            hint="give every document as many keys as queries, or use flash_attention_2, 3 or 4",
        )
    token = torch.arange(batch * length, device=query.device)
    document = torch.searchsorted(cu_seqlens[1:].to(torch.int64), token, right=True).view(batch, 1, length)
    return mask & (document[..., :, None] == document[..., None, :])


# Options that change the result, and the kernels that support them. Other kernels must reject them.
_OPTIONS = {
    "softcap": "eager, triton, flex_attention or flash_attention_2, 3 or 4",
    "s_aux": "eager, triton or flash_attention_4",
    "position_bias": "Transformers' own attention",
}


def reject_options(name: str, kwargs: Mapping[str, Any], served: tuple[str, ...] = ()) -> None:
    """Raise KernelError for an option that implementation `name` does not support."""
    for option, others in _OPTIONS.items():
        if option not in served and kwargs.get(option) is not None:
            raise KernelError(
                f"attn_implementation={name!r} has no {option}",
                hint=f"use {others}",
            )


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Causal: two matmuls in forward and five in backward, over half of the square of each document."""
    q, k = arguments["query"], arguments["key"]
    batch, heads, length, width = q.shape
    cu_seqlens = arguments.get("cu_seq_lens_q")
    squares = batch * length**2 if cu_seqlens is None else int(cu_seqlens.diff().to(torch.int64).square().sum())
    return Cost(bytes=(4 * q.numel() + 6 * k.numel()) * q.element_size(), flops=7 * heads * squares * width)


def _applies_to(model: Any) -> str | None:
    """The variant of the attention modules that use the config of `model`; None where it has none.

    A model that only wraps others, such as a vision-language model, has none.
    """
    can_set = getattr(type(model), "_can_set_attn_implementation", None)
    if can_set is None or not hasattr(model, "config") or not can_set():
        return None
    modules = [m for m in model.modules() if m.__dict__.get("config") is model.config]
    variants = {found[0] for m in modules if (found := attention_options(m)) is not None}
    if not variants and not any("Attention" in type(m).__name__ for m in modules):
        return None
    return "bidirectional" if variants == {"bidirectional"} else "causal"


# What Transformers selects by default; anything else was set by the user.
_DEFAULTS = (None, "sdpa", "eager")


def _keeps(model: Any, attached: _Attached | None, wanted: str) -> str | None:
    """Why a model keeps its attention: its class is not generated, or under "auto" the user selected one."""
    if type(model).__module__.startswith("transformers."):
        return f"{type(model).__name__} has no generated class, so what its attention computes is unknown"
    modules = [m for m in model.modules() if m.__dict__.get("config") is model.config]
    reason = next((f"{type(m).__name__} {why}" for m in modules if (why := skip_reason(m, "attention"))), None)
    if reason:
        return reason
    own = _original(model, attached)
    if wanted == "auto" and own not in _DEFAULTS and not str(own).startswith(PREFIX):
        return f"the model was built with Transformers' {own!r}, which auto keeps"
    return None


class _Attached(NamedTuple):
    """The attention implementation of a config before it was bound, and the one that was set then."""

    previous: str | None
    set_to: str | None


def _original(model: Any, attached: _Attached | None) -> str | None:
    now = model.config._attn_implementation
    return attached.previous if attached is not None and now == attached.set_to else now


def _attach(model: Any, slot: SlotBinding, kernel: Callable[..., Any] | None) -> _Attached:
    """Set the implementation on the model's config, but not on its sub-configs."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from opslot.ops.attention import masks

    previous = model.config._attn_implementation
    if kernel is None:
        # Transformers' code: "eager" if selected, else what the model has, unless no kernel supports it.
        kept = slot.kept and not slot.resolution.explicit
        return _set(model, previous if kept else "eager")
    mask_function: Any = getattr(kernel, "mask_function", None)
    if mask_function is None:
        raise KernelError(
            f"attn_implementation={slot.resolution.chosen!r}: the kernel has no attribute mask_function, so "
            "that no mask can be made for it",
            hint="set it to the function that makes its masks, e.g. transformers.masking_utils.sdpa_mask",
        )
    chosen = slot.resolution.chosen
    falls_back = not slot.resolution.explicit and not masks.applies_any(mask_function)
    if not slot.wrappers:
        mask_function = masks.mask_function(mask_function, chosen, falls_back=falls_back)
        kernel = masks.reads_layout(kernel, _dense if falls_back else None)
    # Transformers treats a name with "flash" as its own kernel, which it gives padded values and no chunks, and towers
    # cu_seqlens.
    shown = chosen.replace("flash", "fa") + ("_flash" if _needs_cu_seqlens(model, slot) else "")
    wrappers = (re.sub(r"\W+", "_", wrapper.name.lower()) for wrapper in slot.wrappers)
    name = PREFIX + "_".join([shown, *(["or_dense"] if falls_back else []), *wrappers])
    AttentionInterface.register(name, kernel)
    AttentionMaskInterface.register(name, mask_function)
    return _set(model, name)


def _needs_cu_seqlens(model: Any, slot: SlotBinding) -> bool:
    modules = (m for m in model.modules() if m.__dict__.get("config") is model.config)
    return slot.resolution.variant == "bidirectional" and any(map(cu_seqlens_for_flash, modules))


def _dense(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """Attention with a dense mask, for kernels that take none."""
    from opslot.ops.attention.sdpa import sdpa

    options = any(kwargs.get(option) is not None for option in _OPTIONS)
    return (reference if options else sdpa)(module, query, key, value, mask, **kwargs)


def _set(model: Any, name: str | None) -> _Attached:
    previous = model.config._attn_implementation
    # The property would set it on the configs of sub-models too.
    model.config._attn_implementation_internal = name
    return _Attached(previous, name)


def _detach(model: Any, state: _Attached) -> None:
    """Undo `_attach`, unless another implementation was set on the model since."""
    if model.config._attn_implementation == state.set_to:
        model.config._attn_implementation_internal = state.previous


def _runs(model: Any) -> str | None:
    return model.config._attn_implementation


def _variant(name: str, description: str) -> OpVariant:
    return OpVariant(
        name,
        reference,
        CASES[name],
        ("query", "key", "value"),
        _cost,
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
    },
    applies_to=_applies_to,
    attach=_attach,
    detach=_detach,
    keeps=_keeps,
    runs=_runs,
)
