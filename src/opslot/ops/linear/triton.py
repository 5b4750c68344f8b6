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
from opslot.ops._common.specs import FLOATS, unsupported_dtype

_KERNEL = "linear_implementation='batch_invariant'"
_HINT = "fix the argument, or set linear_implementation to eager for this module"


def standard(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`op.standard`, in autocast's dtype where autocast is on.

    Raises:
        KernelError: unsupported shapes, dtypes or devices.
    """
    device = input.device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        input, weight = input.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if input.dtype not in FLOATS:
        reject(_KERNEL, "input", unsupported_dtype(input.dtype), _HINT)
    if weight.dim() != 2 or not input.dim() or input.shape[-1] != weight.shape[1]:
        reject(_KERNEL, "weight", f"shape {tuple(weight.shape)} beside input {tuple(input.shape)}", _HINT)
    if weight.dtype != input.dtype:
        reject(_KERNEL, "weight", f"{weight.dtype} beside input of {input.dtype} without torch.autocast", _HINT)
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != input.dtype):
        reject(_KERNEL, "bias", f"{bias.dtype} of shape {tuple(bias.shape)} beside {tuple(weight.shape)}", _HINT)
    if device.type not in ("cuda", "meta") and not triton_interpreted():
        reject(_KERNEL, "input", f"it is on {device}, not a GPU", _HINT)
    return _linear(input, weight, bias)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _allocate(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0])


def _run(out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    linear_into(_rows(out), _rows(input), weight, bias)


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
    allocate=_allocate,
    launch=_run,
    launch_backward=_run_backward,
)
