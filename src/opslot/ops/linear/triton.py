"""`batch_invariant`: a linear layer whose result for a token does not depend on the other tokens of the batch.

Backward is torch's matmuls: gradients sum over tokens anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opslot._base.device import triton_interpreted
from opslot.ops._common.arguments import reject
from opslot.ops._common.batch_invariant import linear_into
from opslot.ops._common.custom_op import differentiable_op
from opslot.ops.linear.arguments import HINT, checked

_KERNEL = "linear_implementation='batch_invariant'"


def standard(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`op.standard`, in autocast's dtype where autocast is on.

    Raises:
        KernelError: unsupported shapes, dtypes or devices.
    """
    input, weight, bias = checked(_KERNEL, input, weight, bias)
    if input.device.type not in ("cuda", "meta") and not triton_interpreted():
        reject(_KERNEL, "input", f"it is on {input.device}, not a GPU", HINT)
    return _linear(input, weight, bias)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _run_backward(
    gradients: tuple[Tensor | None, ...],
    dout: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *needs: bool,
) -> None:
    grad_input, grad_weight, grad_bias = gradients
    dout = _rows(dout)
    if grad_input is not None:
        torch.mm(dout, weight, out=_rows(grad_input))
    if grad_weight is not None:
        torch.mm(dout.t(), _rows(input), out=grad_weight)
    if grad_bias is not None:
        torch.sum(dout, 0, out=grad_bias)


_linear = differentiable_op(
    "batch_invariant_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor",
    allocate=lambda input, weight, bias: input.new_empty(*input.shape[:-1], weight.shape[0]),
    launch=lambda out, input, weight, bias: linear_into(_rows(out), _rows(input), weight, bias),
    launch_backward=_run_backward,
)
