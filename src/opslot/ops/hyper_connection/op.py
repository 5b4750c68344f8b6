"""Hyper-connections: a residual of several streams, their collapse into a layer's input and the way back.

Hyper-Connections (Zhu et al. 2024); manifold-constrained (Xie et al. 2025, arXiv 2512.24880) in DeepSeek-V4 and
GLM-5.3; independent streams in HY-V4. Coefficients of the streams are computed for each token from its RMS-normalized
streams x: logits = scale * (fn x) + base. `pre` collapses the streams into the input of attention or MLP, `post`
distributes its output, and `comb` mixes the streams.

Shapes: B batch, S tokens, N streams, D hidden size, M coefficients of a token; `streams` [B, S, N, D], `output` of
attention or MLP [B, S, D], `fn` [M, N D], `base` [M], and `scale`, one number for each of pre, post and comb that the
variant has. `norm_eps` is that of the RMS norm of all streams of a token together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from opslot.ops._common.model_config import sizes_of
from opslot.ops.hyper_connection.cases import (
    ADD_CASES,
    HEAD_CASES,
    INDEPENDENT_CASES,
    MIX_CASES,
    SINKHORN_CASES,
    collapse_benchmark_case,
    mix_benchmark_case,
)
from opslot.slots import Cost, InputCase, OpSpec, OpVariant


def sinkhorn(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float = 1e-6,
    eps: float = 1e-6,
    iterations: int = 20,
) -> tuple[Tensor, Tensor, Tensor]:
    """post [B, S, N] and comb [B, S, N, N] in float32 (float64 for float64), and the collapsed streams [B, S, D].

    Rows of `comb` are a softmax; then its columns, and `iterations` - 1 times its rows and columns, are divided by
    their sums (Sinkhorn and Knopp 1967).

    Args:
        eps: added to pre, to the softmax, and to the sums by which rows and columns are divided.
    """
    count = streams.shape[-2]
    logits = _projected(streams, fn, norm_eps)
    pre, post, comb = (
        scale[i] * x + b
        for i, (x, b) in enumerate(
            zip(logits.split([count, count, count**2], -1), base.split([count, count, count**2]), strict=True)
        )
    )
    comb = comb.unflatten(-1, (count, count)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return 2 * post.sigmoid(), comb, _collapsed(pre.sigmoid() + eps, streams)


def independent(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float = 1e-6,
    eps: float = 1e-6,
    magnitude: float = 2.0,
) -> tuple[Tensor, Tensor]:
    """post [B, S, N] in float32 (float64 for float64), and the collapsed streams [B, S, D].

    Args:
        eps: added to pre and post.
        magnitude: factor of post.
    """
    count = streams.shape[-2]
    pre, post = _projected(streams, fn, norm_eps).split(count, -1)
    pre = (scale[0] * pre + base[:count]).sigmoid() + eps
    post = magnitude * (scale[1] * post + base[count:]).sigmoid() + eps
    return post, _collapsed(pre, streams)


def head(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float = 1e-6, eps: float = 1e-6) -> Tensor:
    """The collapsed streams [B, S, D], for the last norm; `eps` as in `independent`."""
    pre = scale * _projected(streams, fn, norm_eps) + base
    return _collapsed(pre.sigmoid() + eps, streams)


def mix(post: Tensor, comb: Tensor, output: Tensor, streams: Tensor) -> Tensor:
    """The next streams [B, S, N, D]: post[k] * output + sum over j of comb[j, k] * streams[j].

    Args:
        post, comb: [B, S, N] and [B, S, N, N], rounded to the dtype of `streams`.
    """
    post, comb = post.to(streams.dtype), comb.to(streams.dtype)
    return post.unsqueeze(-1) * output.unsqueeze(-2) + comb.transpose(-1, -2) @ streams


def add(post: Tensor, output: Tensor, streams: Tensor) -> Tensor:
    """The next streams [B, S, N, D]: post[k] * output + streams[k], rounded once; `post` is [B, S, N]."""
    dtype = torch.promote_types(streams.dtype, torch.float32)
    added = post.to(dtype).unsqueeze(-1) * output.to(dtype).unsqueeze(-2) + streams.to(dtype)
    return added.to(streams.dtype)


def unsupported_streams(count: int) -> str | None:
    """Why kernels do not support a number of streams, or None."""
    return None if count in (2, 4, 8) else f"{count} streams, not 2, 4 or 8"


def _projected(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """fn times the normalized streams of a token, [B, S, M]."""
    dtype = torch.promote_types(streams.dtype, torch.float32)
    x = streams.flatten(-2).to(dtype)
    normed = x * (x.square().mean(-1, keepdim=True) + norm_eps).rsqrt()
    return normed @ fn.to(dtype).t()


def _collapsed(pre: Tensor, streams: Tensor) -> Tensor:
    return (pre.unsqueeze(-1) * streams).sum(-2).to(streams.dtype)


def _collapse_cost(arguments: Mapping[str, Any]) -> Cost:
    """Forward reads the streams and writes one; backward reads the streams and a gradient and writes theirs."""
    streams, fn = arguments["streams"], arguments["fn"]
    size, tokens = streams.numel() * streams.element_size(), streams.shape[:-2].numel()
    return Cost(bytes=3 * size + 2 * size // streams.shape[-2], flops=6 * tokens * fn.numel())


def _mix_cost(arguments: Mapping[str, Any]) -> Cost:
    """Forward reads and writes the streams; backward reads them and the gradient, and writes theirs where mixed."""
    size = arguments["streams"].numel() * arguments["streams"].element_size()
    of_output = arguments["output"].numel() * arguments["output"].element_size()
    return Cost(bytes=(5 if "comb" in arguments else 3) * size + 3 * of_output)


def _variant(
    reference: Callable[..., Any],
    cases: list[InputCase],
    differentiable: tuple[str, ...],
    cost: Callable[..., Cost],
    description: str,
    benchmark_case: Callable[..., InputCase] | None = None,
) -> OpVariant:
    """A variant named after its reference."""
    return OpVariant(
        reference.__name__,
        reference,
        cases,
        differentiable,
        cost,
        static_shape=lambda request: sizes_of(request.config, streams="hc_mult", hidden_size="hidden_size"),
        benchmark_case=benchmark_case,
        description=description,
    )


_PARAMETERS = ("streams", "fn", "base", "scale")
_VARIANTS = (
    _variant(
        sinkhorn,
        SINKHORN_CASES,
        _PARAMETERS,
        _collapse_cost,
        "collapse; streams are mixed by a doubly stochastic matrix (DeepSeek-V4, GLM-5.3)",
        collapse_benchmark_case,
    ),
    _variant(independent, INDEPENDENT_CASES, _PARAMETERS, _collapse_cost, "collapse; streams are not mixed (HY-V4)"),
    _variant(head, HEAD_CASES, _PARAMETERS, _collapse_cost, "collapse before the last norm (DeepSeek-V4, HY-V4)"),
    _variant(
        mix,
        MIX_CASES,
        ("post", "comb", "output", "streams"),
        _mix_cost,
        "streams mixed by a matrix, plus a layer's output (DeepSeek-V4, GLM-5.3)",
        mix_benchmark_case,
    ),
    _variant(add, ADD_CASES, ("post", "output", "streams"), _mix_cost, "streams plus a layer's output (HY-V4)"),
)

OP = OpSpec(
    name="hyper_connection",
    description="residual of several streams: collapse into a layer's input, and the way back",
    variants={variant.name: variant for variant in _VARIANTS},
)
