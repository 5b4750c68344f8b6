"""`verify`: check every kernel that this machine can run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from opslot._base.device import facts_of, machine_devices, usable_device
from opslot._base.dtypes import dtype_name
from opslot._base.errors import ConfigError, KernelError
from opslot.slots import KERNEL_REGISTRY, KernelRequest, KernelSpec
from opslot.slots.config import similar_names
from opslot.verify.isolated import Lost, Processes, most_workers, spoils_device
from opslot.verify.parity import CheckResult, check_kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def verify_kernels(
    op: str | Sequence[str] | None = None,
    kernel: str | None = None,
    *,
    device: torch.device | str | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    seed: int = 0,
    workers: int | None = 0,
) -> Iterator[CheckResult]:
    """Check every usable kernel on every input case of its op, forward and all gradients against an fp64 reference.

    Args:
        op: an op or several; default all.
        kernel: only kernels of this name.
        device: default the fastest device of this machine that a kernel runs on.
        dtypes: to check, of those that the kernel claims.
        seed: of the random inputs.
        workers: processes that run the checks; 0 for this process, None for as many as help on a GPU. They import the
            main module, so a script must guard its own work with `if __name__ == "__main__"`. They know only kernels
            that installed packages register.

    Returns:
        An iterator over one result per kernel, case and dtype. Each check runs when its result is requested.

    Raises:
        ConfigError: unknown op, kernel or device.
    """
    ops = [None] if op is None else [op] if isinstance(op, str) else list(dict.fromkeys(op))
    for name in ops:
        if name is not None:
            KERNEL_REGISTRY.op(name)
    specs = [spec for name in ops for spec in KERNEL_REGISTRY.specs(name)]
    if kernel is not None:
        _require_kernel(kernel, specs, [name for name in ops if name is not None])
    checks = [
        KernelCheck(*spec.key, case.name, dtype, str(where), seed)
        for spec in specs
        if kernel in (None, spec.name) and (where := _place(spec, device)) is not None
        for dtype in dtypes
        if spec.dtypes is None or dtype in spec.dtypes
        for case in KERNEL_REGISTRY.op(spec.op_name).variant(spec.variant).cases
        if case.role == "check"
    ]
    if workers is None:
        on_gpu = any(check.device.startswith("cuda") for check in checks)
        workers = min(most_workers(), len(checks)) if on_gpu else 0
    return _run_in_workers(checks, workers) if workers else map(_run, checks)


def _require_kernel(kernel: str, specs: Sequence[KernelSpec], ops: Sequence[str]) -> None:
    names = sorted({spec.name for spec in specs})
    if kernel in names:
        return
    near = similar_names(kernel, names)
    raise ConfigError(
        f"unknown kernel {kernel!r}" + (f" for {', '.join(map(repr, ops))}" if ops else ""),
        found=f"registered: {', '.join(names) or 'only eager'}",
        hint=f"did you mean {' or '.join(map(repr, near))}?" if near else "`opslot kernels` lists all kernels",
    )


def _run_in_workers(checks: list[KernelCheck], workers: int) -> Iterator[CheckResult]:
    """The results of `checks`, in their order, from `workers` processes."""
    found: dict[KernelCheck, CheckResult] = {}
    order = iter(checks)
    following = next(order, None)
    with Processes(workers) as processes:
        for check, result in processes.run(_run, checks, _spoils):
            if isinstance(result, Lost):
                result = check.failed(f"its process {result}")
            found[check] = result
            while following in found:
                yield found.pop(following)
                following = next(order, None)


@dataclass(frozen=True)
class KernelCheck:
    """Compare a registered kernel, in one dtype, with the fp64 reference on one case of its op."""

    op: str
    variant: str
    kernel: str
    case: str
    dtype: torch.dtype
    device: str
    seed: int = 0

    def failed(self, problem: str) -> CheckResult:
        return CheckResult(self.op, self.variant, self.kernel, self.case, dtype_name(self.dtype), problem=problem)

    def run(self) -> CheckResult:
        """Load and check the kernel in this process.

        Raises:
            KernelError: it cannot be loaded.
        """
        variant = KERNEL_REGISTRY.op(self.op).variant(self.variant)
        return check_kernel(
            KERNEL_REGISTRY.load(self.op, self.variant, self.kernel),
            self.op,
            variant,
            variant.case(self.case),
            self.dtype,
            self.device,
            name=self.kernel,
            seed=self.seed,
            relative_error=KERNEL_REGISTRY.get(self.op, self.variant, self.kernel).relative_error,
        )


def _place(spec: KernelSpec, device: torch.device | str | None) -> torch.device | None:
    """The first device that can run `spec`, the fastest first, as training would choose."""
    names = [device] if device is not None else [facts.torch_type for facts in machine_devices()]
    for candidate in map(usable_device, names):
        if spec.unsupported(KernelRequest(spec.op_name, spec.variant, facts_of(candidate))) is None:
            return candidate
    return None


def _run(check: KernelCheck) -> CheckResult:
    try:
        return check.run()
    except KernelError as error:
        return check.failed(str(error))


def _spoils(result: CheckResult) -> bool:
    return spoils_device(result.problem)
