"""Depthwise causal convolution: contract, reference, cost.

Shapes: `hidden_states` [B, D, S], `weight` [D, W], `bias` [D]; out[t] sums weight[j] * x[t - W + 1 + j].
`cu_seqlens` (int32 or int64, [documents + 1], over the B * S tokens, no document crosses rows) keeps the window of a
document's first tokens within the document; Transformers' code does not support it.

`gated` is the short convolution of LFM: the output [B, S, 3 * D] of one projection is a gate, another gate and the
input; the first gate scales what is convolved, the second what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opslot.ops._common.arguments import reject
from opslot.ops._common.cost import elementwise_cost
from opslot.ops._common.documents import check_cu_seqlens, one_row, remove_document_hooks
from opslot.ops.causal_conv1d.cases import CASES, GATED_CASES
from opslot.slots import Cost, OpSpec, OpVariant

_ACTIVATIONS = {None: lambda x: x, "silu": nn.functional.silu, "swish": nn.functional.silu}


def kernel_of(label: str, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`run` of the same arguments with the op's signature, for `label` in errors; it gets documents in one row."""

    def causal_conv1d(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Convolve each channel with its own causal filter, then apply `activation` (None, "silu" or "swish").

        Returns [B, D, S] in the input's dtype.
        """
        if activation not in _ACTIVATIONS:
            reject(label, "activation", f"{activation!r} is neither None nor 'silu'", "use one of these")
        if cu_seqlens is None:
            return run(hidden_states, weight, bias, activation, None)
        rows, channels, length = hidden_states.shape
        check_cu_seqlens(label, "cu_seqlens", cu_seqlens, rows, length)
        # Views of [B, S, D] memory.
        flat = one_row(hidden_states.transpose(1, 2)).transpose(1, 2)
        out = run(flat, weight, bias, activation, cu_seqlens)
        return out.transpose(1, 2).reshape(rows, -1, channels).transpose(1, 2)

    causal_conv1d.__module__, causal_conv1d.__qualname__ = run.__module__, "causal_conv1d"
    return causal_conv1d


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None:
        out = _convolve(x, weight, bias)
    else:
        out = _convolve_documents(x, weight, bias, cu_seqlens)
    return _ACTIVATIONS[activation](out).to(x.dtype)


reference = kernel_of("causal_conv1d", _run)


def gated(projected: Tensor, weight: Tensor, bias: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """Convolve the product of the first and third parts of `projected` [B, S, 3 * D], then scale it by the second.

    Returns [B, S, D] in the input's dtype.
    """
    before, after, x = projected.chunk(3, -1)
    return after * reference((before * x).transpose(1, 2), weight, bias, None, cu_seqlens).transpose(1, 2)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    channels, width = weight.shape
    if not x.shape[-1]:
        # torch's conv1d does not accept zero tokens; this has a zero gradient for the filter.
        empty = x.to(weight.dtype) * weight[:, -1:]
        return empty if bias is None else empty + bias[:, None]
    out = nn.functional.conv1d(x.to(weight.dtype), weight.unsqueeze(1), bias, padding=width - 1, groups=channels)
    return out[..., : x.shape[-1]]


def _convolve_documents(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """One convolution over all documents, separated by zeros of the window size - 1."""
    length, gap = x.shape[-1], weight.shape[1] - 1
    token = torch.arange(length, device=x.device)
    position = token + gap * torch.searchsorted(cu_seqlens[1:].to(torch.int64), token, right=True)
    spaced = x.new_zeros(*x.shape[:-1], length + gap * cu_seqlens.numel()).index_copy(-1, position, x)
    return _convolve(spaced, weight, bias).index_select(-1, position)


def _known_activation(module: Any) -> str | None:
    """Modules without the attribute convolve without an activation."""
    activation = getattr(module, "activation", None)
    return None if activation in _ACTIVATIONS else f"its activation is {activation!r}, not silu"


def _gated_cost(arguments: Mapping[str, Any]) -> Cost:
    """Forward reads three parts and writes one; backward reads these and a gradient, and writes three."""
    projected = arguments["projected"]
    return Cost(bytes=11 * projected.numel() // 3 * projected.element_size())


def _attach(model: nn.Module, slot: Any, kernel: Any) -> list[Any]:
    # It imports torch._dynamo, which lists of kernels do not need.
    from opslot.ops._common.by_document import add_document_hooks

    return add_document_hooks(model, "causal_conv1d")


OP = OpSpec(
    name="causal_conv1d",
    attach=_attach,
    detach=remove_document_hooks,
    description="depthwise causal convolution before a recurrence",
    variants={
        "standard": OpVariant(
            "standard",
            reference,
            CASES,
            ("hidden_states", "weight", "bias"),
            elementwise_cost("hidden_states"),
            _known_activation,
        ),
        "gated": OpVariant(
            "gated",
            gated,
            GATED_CASES,
            ("projected", "weight", "bias"),
            _gated_cost,
            extends="standard",
            description="with a gate before and a gate after it, linear",
        ),
    },
)
