"""Liger-Kernel's SwiGLU activation; backward on copies, since Liger overwrites its arguments with gradients."""

from __future__ import annotations

from typing import Any

import torch
from liger_kernel.ops.swiglu import swiglu_backward, swiglu_forward
from torch import Tensor

from opslot.ops._common.arguments import reject
from opslot.ops._common.custom_op import once_differentiable


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up, out = swiglu_forward(gate.contiguous(), up.contiguous())
        ctx.save_for_backward(gate, up)
        ctx.shape = out.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup = swiglu_backward(gate.clone(), up.clone(), dout.contiguous())
        return dgate.view(ctx.shape), dup.view(ctx.shape)


def standard(gate: Tensor, up: Tensor) -> Tensor:
    """`op.standard` where `gate` and `up` share a shape; mixed dtypes are promoted first."""
    if gate.shape != up.shape:
        found = f"its shape is {tuple(up.shape)} beside gate's {tuple(gate.shape)}"
        reject("swiglu_mlp_implementation='liger_kernel'", "up", found, "use eager, which broadcasts")
    if gate.dtype != up.dtype:
        dtype = torch.promote_types(gate.dtype, up.dtype)
        gate, up = gate.to(dtype), up.to(dtype)
    return _SwiGLU.apply(gate, up)
