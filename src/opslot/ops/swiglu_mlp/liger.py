"""Liger-Kernel's SwiGLU and GeGLU activations; backward on copies, since Liger overwrites its arguments."""

from __future__ import annotations

from typing import Any

import torch
from liger_kernel.ops.geglu import geglu_backward, geglu_forward
from liger_kernel.ops.swiglu import swiglu_backward, swiglu_forward
from torch import Tensor

from opslot.ops._common.activations import Activation, activation_name
from opslot.ops._common.arguments import in_one_dtype, reject
from opslot.ops._common.custom_op import once_differentiable

# Liger's GeGLU computes the tanh approximation.
_FORWARD = {"silu": swiglu_forward, "gelu_tanh": geglu_forward}
_BACKWARD = {"silu": swiglu_backward, "gelu_tanh": geglu_backward}


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        gate, up, out = _FORWARD[activation](gate.contiguous(), up.contiguous())
        ctx.save_for_backward(gate, up)
        ctx.shape, ctx.activation = out.shape, activation
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dgate, dup = _BACKWARD[ctx.activation](gate.clone(), up.clone(), dout.contiguous())
        return dgate.view(ctx.shape), dup.view(ctx.shape), None


def standard(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """`op.standard` of SiLU and GELU's tanh approximation, where `gate` and `up` share a shape; promotes dtypes."""
    label = "swiglu_mlp_implementation='liger_kernel'"
    name = activation_name(activation)
    if name not in _FORWARD:
        reject(label, "activation", f"it is {activation!r}, not silu or gelu_tanh", "use triton or eager")
    if gate.shape != up.shape:
        found = f"its shape is {tuple(up.shape)} beside gate's {tuple(gate.shape)}"
        reject(label, "up", found, "use eager, which broadcasts")
    return _Gated.apply(*in_one_dtype(gate, up), name)
