"""FlashAttention 4 as custom ops, so that torch.compile keeps one graph.

The library's functions break the graph at every layer, which costs more than compilation gains. Here its forward and
backward launches are two opaque ops inside an autograd.Function.

Shapes: B batch, S tokens, N query heads, K key/value heads, D head size, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opslot.ops._common.custom_op import differentiable_op
from opslot.ops.attention.flash4_library import load_interface
from opslot.ops.attention.flash4_replay import Replay, key_of

_INTERFACE = load_interface()
_FORWARD, _BACKWARD = Replay.forward(_INTERFACE), Replay.backward(_INTERFACE)

_ARGUMENTS = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
    "float? softmax_scale, bool causal, int? window_size_left, int? window_size_right, float softcap"
)
# The names that the library has for them.
_OPTIONS = [argument.split()[1] for argument in _ARGUMENTS.split(", ")]


def _allocate(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Output [B, S, N, D] or [T, N, D], and logsumexp [B, N, S] or [N, T] in float32."""
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return out, q.new_empty(lse, dtype=torch.float32)


def _launch(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    outputs = dict(zip(("out", "lse"), _allocate(q, k, v), strict=True))
    inputs = _inputs(q, k, v, *options[:2])
    _FORWARD.call(
        key_of(inputs, options[2:4], options[4:]),
        inputs,
        outputs,
        lambda: _INTERFACE._flash_attn_fwd(q, k, v, return_lse=True, **outputs, **_named(options)),
    )
    return outputs["out"], outputs["lse"]


def _launch_backward(dout: Tensor | None, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of q, k and v."""
    q, k, v, *boundaries, out, lse = arguments[:7]
    options = (*boundaries, *arguments[7:-3])
    dout = torch.zeros_like(out) if dout is None else dout
    inputs = {**_inputs(q, k, v, *boundaries), "out": out, "lse": lse, "dout": dout, "dlse": dlse}
    gradients = {f"d{name}": torch.empty_like(inputs[name]) for name in ("q", "k", "v")}
    _BACKWARD.call(
        key_of(inputs, options[2:4], options[4:]),
        inputs,
        gradients,
        lambda: _INTERFACE._flash_attn_bwd(q, k, v, out, dout, lse, dlse=dlse, **gradients, **_named(options)),
    )
    return tuple(gradients.values())


def _named(options: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(_OPTIONS, options, strict=True))


def _inputs(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> dict[str, Any]:
    # Kernels take no tensors that require gradients.
    tensors = (q.detach(), k.detach(), v.detach(), cu_seqlens_q, cu_seqlens_k)
    return dict(zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), tensors, strict=True))


_attention = differentiable_op(
    f"flash_attention_4(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor out, Tensor lse)",
    allocate=_allocate,
    launch=_launch,
    launch_backward=_launch_backward,
    allocate_gradients=lambda dout, dlse, *arguments: tuple(map(torch.empty_like, arguments[:3])),
    in_place=False,
    differentiable=3,
    kept=("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "out", "lse"),
)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """Attention of q [B, S, N, D] over k and v [B, S, K, D]; with cu_seqlens of q [T, N, D] over k and v [T, K, D].

    Returns:
        The output, shaped as q; with `return_lse` also the logsumexp, float32 [B, N, S] or [N, T].
    """
    options = (max_seqlen_q, max_seqlen_k, softmax_scale, causal, *window_size, softcap)
    out, lse = _attention(q, k, v, cu_seqlens_q, cu_seqlens_k, *options)
    return (out, lse) if return_lse else out


flash_attn_varlen_func = flash_attn_func
