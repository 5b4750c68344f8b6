"""The activations of `activations.py` in Triton, on fp32 values."""

from __future__ import annotations

import triton
import triton.language as tl

from opslot.ops._common.activations import limit_has_gradient

_LIMIT_HAS_GRADIENT = tl.constexpr(limit_has_gradient())


@triton.jit
def is_below_limit(x, limit):
    """Whether torch.clamp(x, max=limit) passes the gradient of x."""
    if _LIMIT_HAS_GRADIENT:
        below = x <= limit
    else:
        below = x < limit
    return below


@triton.jit
def activation(x, NAME: tl.constexpr, ALPHA: tl.constexpr = 1.0):
    """The activation called NAME; `silu` is x * sigmoid(ALPHA * x)."""
    if NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    # Comparisons keep NaN.
    elif NAME == "relu":
        return tl.where(x < 0.0, 0.0, x)
    elif NAME == "relu2":
        positive = tl.where(x < 0.0, 0.0, x)
        return positive * positive
    elif NAME == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u)
        return x * tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    elif NAME == "quick_gelu":
        return x * tl.sigmoid(1.702 * x)
    else:
        return x * tl.sigmoid(ALPHA * x)


@triton.jit
def activation_and_slope(x, NAME: tl.constexpr, ALPHA: tl.constexpr = 1.0):
    """The activation called NAME and its derivative."""
    if NAME == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * cdf, cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif NAME == "relu":
        return tl.where(x < 0.0, 0.0, x), tl.where(x <= 0.0, 0.0, 1.0)
    elif NAME == "relu2":
        positive = tl.where(x < 0.0, 0.0, x)
        return positive * positive, 2.0 * positive
    elif NAME == "gelu_tanh":
        inner = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)
        sigmoid = tl.sigmoid(inner)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        # 1 - sigmoid would cancel for large x, where the slope of `inner` is large.
        return x * sigmoid, sigmoid * (1.0 + x * slope * tl.sigmoid(-inner))
    elif NAME == "quick_gelu":
        sigmoid = tl.sigmoid(1.702 * x)
        return x * sigmoid, sigmoid * (1.0 + 1.702 * x * (1.0 - sigmoid))
    else:
        sigmoid = tl.sigmoid(ALPHA * x)
        return x * sigmoid, sigmoid * (1.0 + ALPHA * x * (1.0 - sigmoid))
