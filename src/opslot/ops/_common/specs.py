"""Registers kernels of an op, and what the registrations share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from opslot._base.device import triton_interpreted
from opslot.slots import KERNEL_REGISTRY, HardwareRequirement, KernelRequest, KernelSpec, OpSpec, Requirement
from opslot.slots.spec import TRITON

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
HALF_FLOATS = frozenset({torch.bfloat16, torch.float16})

# The GPU that the priorities of opslot's kernels were measured on.
H200 = (9, 0)

# Versions that kernels require; the extras of pyproject.toml state the same.
LIGER = Requirement("liger_kernel", "liger-kernel", ">=0.8")
QUACK = Requirement("quack", "quack-kernels", ">=0.5")
CUTLASS = Requirement("cutlass", "nvidia-cutlass-dsl")
FLA = Requirement("fla", "fla-core", ">=0.6")


def runs_triton(x: torch.Tensor) -> bool:
    """Whether Triton kernels run on the device of `x`."""
    return (x.is_cuda or (x.is_cpu and triton_interpreted())) and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return TRITON.unsupported() is None


def unsupported_dtype(dtype: torch.dtype) -> str:
    """The `found` of an error about an argument whose dtype is not in `FLOATS`."""
    return f"its dtype is {dtype}, not float32, bfloat16 or float16"


def add_kernel(
    op: OpSpec,
    name: str,
    factory: str | Callable[[], Callable[..., Any]],
    variants: Iterable[str] | None = None,
    **options: Any,
) -> None:
    """Register a kernel for `variants` of an op, by default all.

    Args:
        factory: "file:function" in the op's folder, where {variant} is the variant; or as `KernelSpec` takes it.
        options: of `KernelSpec`.
    """
    for variant in op.variants if variants is None else variants:
        path = f"opslot.ops.{op.name}.{factory.format(variant=variant)}" if isinstance(factory, str) else factory
        KERNEL_REGISTRY.register(KernelSpec(name, op.name, variant, path, **options))


def add_gpu_kernel(
    op: OpSpec,
    name: str,
    factory: str | Callable[[], Callable[..., Any]],
    requires: tuple[Requirement | str, ...],
    variants: Iterable[str] | None = None,
    *,
    capability: tuple[int, int] = (8, 0),
    dtypes: frozenset[torch.dtype] = FLOATS,
    **options: Any,
) -> None:
    """`add_kernel` for GPUs from `capability` on."""
    hardware = HardwareRequirement("gpu", min_compute_capability=capability)
    add_kernel(op, name, factory, variants, hardware=hardware, requires=requires, dtypes=dtypes, **options)


def add_triton_kernel(
    op: OpSpec,
    variants: Iterable[str] | None = None,
    *,
    name: str = "triton",
    factory: str = "triton:{variant}",
    **options: Any,
) -> None:
    """A Triton kernel, for GPUs from Ampere on and the interpreter."""
    add_gpu_kernel(op, name, factory, (TRITON,), variants, portable=True, interpretable=True, **options)


def add_liger_kernel(op: OpSpec, variants: Iterable[str], **options: Any) -> None:
    """The functions of the op's liger.py."""
    add_gpu_kernel(op, "liger_kernel", "liger:{variant}", (LIGER, TRITON), variants, portable=True, **options)


def add_npu_kernel(
    op: OpSpec,
    variants: Iterable[str] | None = None,
    *,
    name: str = "npu",
    factory: str = "npu:{variant}",
    dtypes: frozenset[torch.dtype] = FLOATS,
    **options: Any,
) -> None:
    """`add_kernel` for Ascend NPUs."""
    npu = HardwareRequirement("npu")
    add_kernel(op, name, factory, variants, hardware=npu, requires=("torch_npu",), dtypes=dtypes, **options)


def add_torch_kernel(op: OpSpec, variants: Iterable[str], **options: Any) -> None:
    """The functions of the op's torch_fused.py: plain torch, for any device."""
    add_kernel(op, "torch_fused", "torch_fused:{variant}", variants, portable=True, **options)


def priority_in_16_bits(request: KernelRequest) -> int | None:
    """80 where a kernel was measured: `standard` in bf16 and fp16, all other variants only in bf16."""
    measured = HALF_FLOATS if request.variant == "standard" else {torch.bfloat16}
    return 80 if request.dtype in measured else None


def fp32_priority(request: KernelRequest) -> int | None:
    """60 for float32, else None: on CPUs plain torch is faster than eager in float32, not in bfloat16."""
    return 60 if request.dtype in (None, torch.float32) else None
