"""`verify`: prove every kernel that this machine can run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from opslot._base.device import facts_of, machine_devices, usable_device
from opslot._base.errors import KernelError
from opslot.slots import KERNEL_REGISTRY, KernelRequest, KernelSpec
from opslot.testing.parity import CheckResult, check_kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def verify(
    op: str | None = None,
    kernel: str | None = None,
    *,
    device: torch.device | str | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    seed: int = 0,
) -> Iterator[CheckResult]:
    """Check every usable kernel on every input case of its op, forward and all gradients against an fp64 truth.

    Args:
        op, kernel: only these; default all.
        device: where; default each kernel's own kind of device on this machine.
        dtypes: those of them that the kernel claims.
        seed: of the random inputs.

    Yields:
        One result per kernel, case and dtype, as it is found.

    Raises:
        ConfigError: there is no such op or device.
    """
    if op is not None:
        KERNEL_REGISTRY.op(op)
    for spec in KERNEL_REGISTRY.specs(op):
        if kernel not in (None, spec.name):
            continue
        where = _place(spec, device)
        if where is not None:
            yield from _verify_spec(spec, where, dtypes, seed)


def _place(spec: KernelSpec, device: torch.device | str | None) -> torch.device | None:
    """The first device that can run `spec`: the fastest kind first, as training would."""
    names = [device] if device is not None else [facts.torch_type for facts in machine_devices()]
    for candidate in map(usable_device, names):
        if spec.unusable(KernelRequest(spec.op_name, spec.variant, facts_of(candidate))) is None:
            return candidate
    return None


def _verify_spec(
    spec: KernelSpec, device: torch.device, dtypes: Sequence[torch.dtype], seed: int
) -> Iterator[CheckResult]:
    variant = KERNEL_REGISTRY.op(spec.op_name).variant(spec.variant)
    try:
        loaded = KERNEL_REGISTRY.load(*spec.key)
    except KernelError as error:
        yield CheckResult(spec.op_name, spec.variant, spec.name, "-", "-", problem=str(error))
        return
    for case in variant.cases:
        if case.role != "check":
            continue
        for dtype in dtypes:
            if spec.dtypes is None or dtype in spec.dtypes:
                yield check_kernel(loaded, spec.op_name, variant, case, dtype, device, name=spec.name, seed=seed)
