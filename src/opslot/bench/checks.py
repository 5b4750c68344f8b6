"""Check many kernels; on a GPU in worker processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opslot._base.dtypes import dtype_name
from opslot._base.errors import KernelError
from opslot.bench.baselines import baseline_kernels
from opslot.slots import KERNEL_REGISTRY, OpVariant
from opslot.verify.isolated import Lost, Processes, spoils_device
from opslot.verify.kernels import KernelCheck
from opslot.verify.parity import CheckResult, compare, expect

_EXITED = "WRONG: the process that checked it exited"
_TIMED_OUT = "unchecked: its check "
# A kernel that compiles for longer at one shape is of no use; the start of a process is included.
_TIMEOUT_S = 180.0
_REPORT_S = 15.0


@dataclass(frozen=True)
class Check(KernelCheck):
    """Compare one implementation with the op's fp64 reference, in one dtype, on one case.

    Attributes:
        kernel: a registered kernel's name, or a baseline's as `baseline_kernels` calls it.
        case: a check case's name; for a baseline a bench case's, or the one that `tokens` and `shape` make.
        baseline: the baseline, for a baseline's kernel.
    """

    baseline: str | None = None
    tokens: int | None = None
    shape: tuple[tuple[str, int], ...] = ()


def run_checks(
    checks: Sequence[Check], workers: Processes | None = None, report: Callable[[str], None] | None = None
) -> dict[Check, str]:
    """The outcome of each check: "ok", "unsupported: why", "WRONG ..." or "unchecked: why" after a timeout.

    Args:
        workers: where to check; None is this process.
        report: called now and then with how many are done.
    """
    if workers is None:
        return {check: run_check(check) for check in checks}
    outcomes: dict[Check, str] = {}
    reported = time.monotonic()
    for check, outcome in workers.run(_run_in_worker, checks, spoils_device, _TIMEOUT_S):
        if isinstance(outcome, Lost):
            outcome = _EXITED if outcome == "exited" else f"{_TIMED_OUT}{outcome}"
        outcomes[check] = outcome
        if report is not None and time.monotonic() - reported > _REPORT_S:
            reported = time.monotonic()
            report(f"{len(outcomes)} of {len(checks)} checks done")
    return outcomes


def combine(outcomes: Sequence[str]) -> str:
    """One outcome for a kernel from those of all of its check cases, in their order.

    "unchecked: why" where no case is supported.
    """
    if bad := [o for o in outcomes if o != "ok" and not o.startswith("unsupported")]:
        return bad[0]
    if outcomes and "ok" not in outcomes:
        return outcomes[0].replace("unsupported", "unchecked", 1)
    return "ok"


def _run_in_worker(check: Check) -> str:
    """The outcome, from a process that runs while others are timed, so it must hold no device memory."""
    outcome = run_check(check)
    if check.device.startswith("cuda") and not spoils_device(outcome):
        torch.cuda.empty_cache()
    return outcome


def cannot_run(outcome: str) -> bool:
    """Whether running the implementation again, here, would end this process or take too long."""
    return outcome == _EXITED or spoils_device(outcome) or outcome.startswith(f"{_TIMED_OUT}was not done")


def run_check(check: Check) -> str:
    """Run one check in this process."""
    try:
        if check.baseline is not None:
            kernels = baseline_kernels([check.baseline], check.op, check.variant)
            variant = KERNEL_REGISTRY.op(check.op).variant(check.variant)
            return _check_as_timed(check, variant, kernels[check.kernel])
        return describe(check.run())
    except KernelError as error:
        return f"unchecked: {brief(error)}"


def _check_as_timed(check: Check, variant: OpVariant, kernel: Callable[..., Any]) -> str:
    if check.tokens is None:
        case = variant.case(check.case)
    else:
        assert variant.benchmark_case is not None
        case = variant.benchmark_case(dict(check.shape), check.tokens)
    device = torch.device(check.device)
    label = CheckResult(check.op, check.variant, check.kernel, case.name, dtype_name(check.dtype))
    try:
        expected = expect(variant, case.make(check.dtype, device, generator_of(device)))
        return describe(compare(kernel, expected, label, by_norm=True))
    except torch.OutOfMemoryError:
        return "unchecked: the fp64 reference of this case exceeds the memory"


def generator_of(device: torch.device) -> torch.Generator:
    """The generator of the inputs of timed cases."""
    return torch.Generator(device=device).manual_seed(0)


def describe(result: CheckResult) -> str:
    """A check's result as an outcome."""
    if result.unsupported:
        return f"unsupported: {brief(result.unsupported)}"
    if result.problem:
        return f"WRONG {result.case}: {brief(result.problem)}"
    worst = result.worst
    if result.ok or worst is None:
        return "ok"
    return f"WRONG {result.case}: {worst.name} error {worst.error:.1e}, bound {worst.bound:.1e}"


def brief(message: Any) -> str:
    """The first line, cut to what fits beside a number."""
    return (str(message).strip().splitlines() or [""])[0][:160]
