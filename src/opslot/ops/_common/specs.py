"""What the registrations of Triton and vendor kernels have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opslot.slots import HardwareRequirement, KernelRequest, KernelSpec

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
HALF_FLOATS = frozenset({torch.bfloat16, torch.float16})


def no_float(dtype: torch.dtype) -> str:
    """What is found of an argument whose dtype is none of `FLOATS`."""
    return f"its dtype is {dtype}, not float32, bfloat16 or float16"


def triton_kernel(
    op_name: str, variant: str, *, name: str = "triton", function: str | None = None, **options: Any
) -> KernelSpec:
    """A kernel `function`, default `<variant>`, of the op's triton.py, for GPUs from Ampere on and the interpreter."""
    return KernelSpec(
        name,
        op_name,
        variant,
        f"opslot.ops.{op_name}.triton:{function or variant}",
        HardwareRequirement("gpu", min_compute_capability=(8, 0)),
        requires=("triton",),
        dtypes=FLOATS,
        interpretable=True,
        **options,
    )


def liger_kernel(op_name: str, variant: str, **options: Any) -> KernelSpec:
    """A kernel `<variant>` of the op's liger.py."""
    return KernelSpec(
        "liger_kernel",
        op_name,
        variant,
        f"opslot.ops.{op_name}.liger:{variant}",
        HardwareRequirement("gpu", min_compute_capability=(8, 0)),
        requires=("liger_kernel", "triton"),
        dtypes=FLOATS,
        **options,
    )


def quack_kernel(op_name: str, variant: str, **options: Any) -> KernelSpec:
    """A kernel `<variant>` of the op's quack.py, for GPUs from Hopper on."""
    return KernelSpec(
        "quack",
        op_name,
        variant,
        f"opslot.ops.{op_name}.quack:{variant}",
        HardwareRequirement("gpu", min_compute_capability=(9, 0)),
        requires=("quack", "cutlass"),
        dtypes=FLOATS,
        **options,
    )


def npu_kernel(op_name: str, variant: str, **options: Any) -> KernelSpec:
    """A kernel `<variant>` of the op's npu.py."""
    return KernelSpec(
        "npu",
        op_name,
        variant,
        f"opslot.ops.{op_name}.npu:{variant}",
        HardwareRequirement("npu"),
        requires=("torch_npu",),
        dtypes=FLOATS,
        **options,
    )


def cpu_rank(rank: int) -> Callable[[KernelRequest], int | None]:
    """`rank` on CPUs in float32, where plain torch was measured ahead of eager; in bfloat16 it can be behind."""

    def priority(request: KernelRequest) -> int | None:
        return rank if request.device.type == "cpu" and request.dtype in (None, torch.float32) else None

    return priority


def torch_kernel(op_name: str, variant: str, **options: Any) -> KernelSpec:
    """A kernel `<variant>` of the op's torch_fused.py: plain torch, for any device."""
    return KernelSpec("torch_fused", op_name, variant, f"opslot.ops.{op_name}.torch_fused:{variant}", **options)
