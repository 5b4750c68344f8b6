"""Linear layers with a frozen weight, in NF4 or not, and an adapter (LoRA), as one function.

The adapter is added to the layer's output and its gradient to that of the input by the GEMMs themselves, without
elementwise launches. A quantized weight is dequantized in forward and again in backward; the caching allocator reuses
the memory, so at any time there is one dequantized weight. Backward needs the input, for the gradient of the adapter;
an input that a cheap kernel computes again from what it keeps for its own backward is not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from opslot._base.errors import KernelError
from opslot.ops._common.aligned_rows import mark_padded, view_without_padding, with_padding
from opslot.ops._common.custom_op import in_dispatch_mode, no_view, recompute, recomputed_by
from opslot.ops.linear.aligned import is_unaligned, padded_weight
from opslot.ops.linear.nf4 import dequantize


class Adapter(NamedTuple):
    """Adds input down^T up^T * scale to the output.

    Attributes:
        down: [r, K], up: [V, r], in the dtype of the input.
    """

    down: Tensor
    up: Tensor
    scale: float


def serves(x: Tensor, *weights: Any) -> bool:
    """Whether `linear` takes tensors: of one dtype, without autocast, torch.compile and transforms of torch.func."""
    return not (
        torch.compiler.is_compiling()
        or any(weight.dtype != x.dtype for weight in weights)
        or torch.is_autocast_enabled(x.device.type)
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def is_inference(x: Tensor) -> bool:
    """Whether bitsandbytes computes a layer, whose kernels for few tokens (generation) do not dequantize the weight."""
    return x.is_cuda and not torch.is_grad_enabled()


def linear(x: Tensor, weight: Any, bias: Tensor | None, adapter: Adapter | None) -> Tensor:
    """input weight^T + bias, plus the adapter's part.

    Args:
        x: [..., K].
        weight: [V, K] without gradient, or bitsandbytes' Params4bit of such a weight.
        bias: [V] without gradient.
    """
    packed = weight if hasattr(weight, "quant_state") else None
    down, up, scale = (None, None, 0.0) if adapter is None else adapter
    source = recomputed_by(x) if down is not None and down.requires_grad else None
    return mark_padded(_Linear.apply(x, None if packed is not None else weight, bias, down, up, scale, packed, source))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        down: Tensor | None,
        up: Tensor | None,
        scale: float,
        packed: Any,
        source: Any,
    ) -> Tensor:
        base = dequantize(packed) if weight is None else weight
        layout = _PADDED if is_unaligned(base) else _PLAIN
        rows = layout.rows(x)
        out = F.linear(rows, layout.weight(base), None if bias is None else layout.weight(bias))
        inner = None
        if down is not None and up is not None:
            inner = F.linear(rows, layout.weight(down))
            out = _add_product(out, inner, layout.weight(up).t(), scale)
        ctx.shape, ctx.scale, ctx.packed, ctx.layout = x.shape, scale, packed, layout
        needs_input = ctx.needs_input_grad[3]
        ctx.source = source if needs_input else None
        ctx.save_for_backward(x if needs_input and source is None else None, weight, down, up, inner)
        with no_view():
            return layout.view(out, *x.shape[:-1], len(base))

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, up, inner = ctx.saved_tensors
        need_input, _, _, need_down, need_up = ctx.needs_input_grad[:5]
        again = torch.is_grad_enabled()
        if again and x is None and down is not None:
            raise KernelError(
                "linear: a layer with an adapter did not keep its input, which create_graph=True requires",
                hint="set linear and swiglu_mlp to eager, or leave create_graph out",
            )
        if ctx.source is not None:
            x = recompute(ctx.source)
        layout = _PLAIN if again else ctx.layout
        dout = layout.rows(dout)
        dx = dinner = ddown = dup = None
        if need_input:
            dx = dout @ layout.weight(dequantize(ctx.packed) if weight is None else weight)
        if down is not None:
            rows = None if x is None else layout.rows(x)
            dinner = (dout @ layout.weight(up)) * ctx.scale
            if need_down:
                ddown = _cut(dinner.t() @ rows, down)
            if need_up:
                if again:
                    inner = rows @ down.t()  # the saved one is a constant
                dup = _cut(dout.t() @ (inner * ctx.scale), up)
            if dx is not None:
                dx = _add_product(dx, dinner, layout.weight(down), 1.0)
        return None if dx is None else layout.view(dx, *ctx.shape), None, None, ddown, dup, None, None, None


class _Layout(NamedTuple):
    """How matrices are multiplied.

    Attributes:
        weight: a weight or bias as it is multiplied.
        rows: an activation [..., C] as rows.
        view: rows as an activation of a shape.
    """

    weight: Callable[[Tensor], Tensor]
    rows: Callable[[Tensor], Tensor]
    view: Callable[..., Tensor]


_PLAIN = _Layout(lambda weight: weight, lambda x: x.reshape(-1, x.shape[-1]), Tensor.view)
# See `aligned.py`.
_PADDED = _Layout(padded_weight, with_padding, view_without_padding)


def _cut(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient without its padding."""
    if gradient.shape == parameter.shape:
        return gradient
    return gradient[: parameter.shape[0], : parameter.shape[1]].contiguous()


def _add_product(out: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """out + a b * scale, written to `out` unless a dispatch mode (selective checkpointing) or autograd keeps it."""
    if in_dispatch_mode() or torch.is_grad_enabled():
        return torch.addmm(out, a, b, alpha=scale)
    return out.addmm_(a, b, alpha=scale)
