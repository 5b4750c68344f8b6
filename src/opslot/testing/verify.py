"""`verify`: prove every kernel that this machine can run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from opslot._base.device import facts_of, machine_devices, usable_device
from opslot._base.dtypes import dtype_name
from opslot._base.errors import KernelError
from opslot.slots import KERNEL_REGISTRY, KernelRequest, KernelSpec
from opslot.testing.apart import Processes, run_apart, spoils_device, workers_for
from opslot.testing.parity import CheckResult, check_kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def verify(
    op: str | None = None,
    kernel: str | None = None,
    *,
    device: torch.device | str | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    seed: int = 0,
    workers: int | None = 0,
) -> Iterator[CheckResult]:
    """Check every usable kernel on every input case of its op, forward and all gradients against an fp64 truth.

    Args:
        op, kernel: only these; default all.
        device: where; default each kernel's own kind of device on this machine.
        dtypes: those of them that the kernel claims.
        seed: of the random inputs.
        workers: processes beside this one, which share the kernels; None takes as many as help on a GPU. They import
            the main module, so a script must guard its own work with `if __name__ == "__main__"`, and know the kernels
            of installed packages alone.

    Yields:
        One result per kernel, case and dtype, as it is found; with workers, when all are.

    Raises:
        ConfigError: there is no such op or device.
    """
    if op is not None:
        KERNEL_REGISTRY.op(op)
    shares = [
        _Share(*spec.key, dtype, str(where), seed)
        for spec in KERNEL_REGISTRY.specs(op)
        if kernel in (None, spec.name) and (where := _place(spec, device)) is not None
        for dtype in dtypes
        if spec.dtypes is None or dtype in spec.dtypes
    ]
    if workers is None:
        workers = workers_for(len(shares), any(share.device.startswith("cuda") for share in shares))
    if not workers:
        for share in shares:
            yield from _check(share)
        return
    with Processes(workers) as processes:
        found, died = run_apart(_check_all, shares, processes, _spoils)
    for share in died:
        found[share] = [share.failed("the process that checked it died")]
    for share in shares:
        yield from found[share]


@dataclass(frozen=True)
class _Share:
    """One kernel in one dtype, on all cases of its op."""

    op: str
    variant: str
    kernel: str
    dtype: torch.dtype
    device: str
    seed: int

    def failed(self, problem: str) -> CheckResult:
        return CheckResult(self.op, self.variant, self.kernel, "-", dtype_name(self.dtype), problem=problem)


def _place(spec: KernelSpec, device: torch.device | str | None) -> torch.device | None:
    """The first device that can run `spec`: the fastest kind first, as training would."""
    names = [device] if device is not None else [facts.torch_type for facts in machine_devices()]
    for candidate in map(usable_device, names):
        if spec.unusable(KernelRequest(spec.op_name, spec.variant, facts_of(candidate))) is None:
            return candidate
    return None


def _check(share: _Share) -> Iterator[CheckResult]:
    variant = KERNEL_REGISTRY.op(share.op).variant(share.variant)
    try:
        loaded = KERNEL_REGISTRY.load(share.op, share.variant, share.kernel)
    except KernelError as error:
        yield share.failed(str(error))
        return
    for case in variant.cases:
        if case.role == "check":
            yield check_kernel(
                loaded, share.op, variant, case, share.dtype, share.device, name=share.kernel, seed=share.seed
            )


def _check_all(share: _Share) -> list[CheckResult]:
    return list(_check(share))


def _spoils(results: list[CheckResult]) -> bool:
    return any(spoils_device(result.problem) for result in results)
