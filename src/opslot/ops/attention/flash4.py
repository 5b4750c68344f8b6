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
from opslot.ops.attention.kernels.sinks import sinks_gradient

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


def _launch(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    outputs = dict(zip(("out", "lse"), _allocate(q, k, v), strict=True))
    if sinks is not None:
        # The library requires addresses that are multiples of 4, which those of a rank's heads need not be.
        sinks = sinks.detach() if sinks.data_ptr() % 4 == 0 else sinks.detach().clone()
    inputs = {**_inputs(q, k, v, *options[:2]), "sinks": sinks}
    _FORWARD.call(
        key_of(inputs, options[2:4], options[4:]),
        inputs,
        outputs,
        lambda: _INTERFACE._flash_attn_fwd(
            q, k, v, learnable_sink=sinks, return_lse=True, **outputs, **_named(options)
        ),
    )
    return outputs["out"], outputs["lse"]


def _allocate_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, (q, k, v)))


def _fake_gradients(dout: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, *_, need_sinks = arguments
    return *_allocate_gradients(q, k, v), torch.empty_like(sinks) if need_sinks else None


def _launch_backward(dout: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and, if it is needed, of the sinks, which the library does not compute."""
    q, k, v, sinks, *boundaries, out, lse = arguments[:8]
    options, need_sinks = (*boundaries, *arguments[8:-4]), arguments[-1]
    inputs = {**_inputs(q, k, v, *boundaries), "out": out, "lse": lse, "dout": dout}
    gradients = dict(zip(("dq", "dk", "dv"), _allocate_gradients(q, k, v), strict=True))
    _BACKWARD.call(
        key_of(inputs, options[2:4], options[4:]),
        inputs,
        gradients,
        lambda: _INTERFACE._flash_attn_bwd(q, k, v, out, dout, lse, **gradients, **_named(options)),
    )
    return *gradients.values(), sinks_gradient(sinks, lse, out, dout) if need_sinks else None


def _named(options: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(_OPTIONS, options, strict=True))


def _inputs(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> dict[str, Any]:
    # Kernels take no tensors that require gradients.
    tensors = (q.detach(), k.detach(), v.detach(), cu_seqlens_q, cu_seqlens_k)
    return dict(zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), tensors, strict=True))


_attention = differentiable_op(
    f"flash_attention_4(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_ARGUMENTS}) -> (Tensor out, Tensor lse)",
    allocate=_allocate,
    launch=_launch,
    launch_backward=_launch_backward,
    allocate_gradients=_fake_gradients,
    in_place=False,
    differentiable=4,
    kept=("q", "k", "v", "sinks", "cu_seqlens_q", "cu_seqlens_k", "out", "lse"),
    returned=1,
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
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [B, S, N, D] over k and v [B, S, K, D]; with cu_seqlens of q [T, N, D] over k and v [T, K, D].

    Args:
        sinks: bfloat16 [N], logits without a value in the softmax of every query.

    Returns:
        The output, [..., N, head size of v].
    """
    options = (max_seqlen_q, max_seqlen_k, softmax_scale, causal, *window_size, softcap)
    return _attention(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *options)


flash_attn_varlen_func = flash_attn_func
