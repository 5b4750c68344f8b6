"""Checks of the arguments that the kernels of linear share."""

from __future__ import annotations

from torch import Tensor

from opslot.ops._common.arguments import in_autocast_dtype, reject, require_floats

HINT = "fix the argument, or set linear_implementation to eager for this module"


def checked(kernel: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The arguments of `op.standard`, in autocast's dtype where autocast is on.

    Args:
        kernel: its configuration, for errors.

    Raises:
        KernelError: unsupported shapes or dtypes.
    """
    input, weight, bias = in_autocast_dtype(input, weight, bias)
    require_floats(kernel, HINT, input=input)
    if weight.dim() != 2 or not input.dim() or input.shape[-1] != weight.shape[1]:
        reject(kernel, "weight", f"shape {tuple(weight.shape)} beside input {tuple(input.shape)}", HINT)
    if weight.dtype != input.dtype:
        reject(kernel, "weight", f"{weight.dtype} beside input of {input.dtype} without torch.autocast", HINT)
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != input.dtype):
        reject(kernel, "bias", f"{bias.dtype} of shape {tuple(bias.shape)} beside {tuple(weight.shape)}", HINT)
    return input, weight, bias
