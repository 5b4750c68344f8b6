"""KernelSpecs of Triton and vendor kernels, shared by the ops' registrations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opslot.slots import HardwareRequirement, KernelRequest, KernelSpec, Requirement
from opslot.slots.spec import TRITON

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
HALF_FLOATS = frozenset({torch.bfloat16, torch.float16})

# The GPU that the priorities of opslot's kernels were measured on.
H200 = (9, 0)

# Versions that kernels require; the extras of pyproject.toml state the same.
LIGER = Requirement("liger_kernel", "liger-kernel", ">=0.8")
QUACK = Requirement("quack", "quack-kernels", ">=0.5")
CUTLASS = Requirement("cutlass", "nvidia-cutlass-dsl")
FLA = Requirement("fla", "fla-core")


def unsupported_dtype(dtype: torch.dtype) -> str:
    """The `found` of an error about an argument whose dtype is not in `FLOATS`."""
    return f"its dtype is {dtype}, not float32, bfloat16 or float16"


def gpu_kernel(
    name: str,
    op_name: str,
    variant: str,
    function: str,
    requires: tuple[Requirement | str, ...],
    *,
    capability: tuple[int, int] = (8, 0),
    dtypes: frozenset[torch.dtype] = FLOATS,
    **options: Any,
) -> KernelSpec:
    """A kernel for GPUs from `capability` on; `function` is "file:function" in the op's folder."""
    hardware = HardwareRequirement("gpu", min_compute_capability=capability)
    factory = f"opslot.ops.{op_name}.{function}"
    return KernelSpec(name, op_name, variant, factory, hardware, requires=requires, dtypes=dtypes, **options)


def triton_kernel(
    op_name: str,
    variant: str,
    *,
    name: str = "triton",
    function: str | None = None,
    file: str = "triton",
    **options: Any,
) -> KernelSpec:
    """A kernel `function`, default `<variant>`, of the op's `file`, for GPUs from Ampere on and the interpreter."""
    path = f"{file}:{function or variant}"
    return gpu_kernel(name, op_name, variant, path, (TRITON,), portable=True, interpretable=True, **options)


def liger_kernel(op_name: str, variant: str, **options: Any) -> KernelSpec:
    """A kernel `<variant>` of the op's liger.py."""
    return gpu_kernel("liger_kernel", op_name, variant, f"liger:{variant}", (LIGER, TRITON), portable=True, **options)


def quack_kernel(op_name: str, variant: str, *, quack: Requirement = QUACK, **options: Any) -> KernelSpec:
    """A kernel `<variant>` of the op's quack.py, for GPUs from Hopper on."""
    return gpu_kernel("quack", op_name, variant, f"quack:{variant}", (quack, CUTLASS), capability=(9, 0), **options)


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


def fp32_priority(value: int) -> Callable[[KernelRequest], int | None]:
    """`value` for float32, else None: on CPUs plain torch is faster than eager in float32, not in bfloat16."""
    return lambda request: value if request.dtype in (None, torch.float32) else None


def torch_kernel(op_name: str, variant: str, **options: Any) -> KernelSpec:
    """A kernel `<variant>` of the op's torch_fused.py: plain torch, for any device."""
    return KernelSpec(
        "torch_fused", op_name, variant, f"opslot.ops.{op_name}.torch_fused:{variant}", portable=True, **options
    )
