"""Proofs of many kernels at once, in processes of their own on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opslot._base.dtypes import dtype_name
from opslot._base.errors import KernelError
from opslot.slots import KERNEL_REGISTRY, OpVariant
from opslot.testing.apart import Processes, run_apart, spoils_device
from opslot.testing.parity import CheckResult, check_kernel, compare, expect
from opslot.testing.peers import peer_kernels

_DIED = "WRONG: the process that checked it died"


@dataclass(frozen=True)
class Claim:
    """What is to be proven: that an implementation computes what the op's reference does, in one dtype.

    Attributes:
        kernel: a registered kernel's name, or a peer's as `peer_kernels` calls it.
        peer: the peer, for a peer's.
        case: a bench case's name, or what `tokens` and `shape` make, for a claim about that input alone; None for all
            of the op's check cases.
    """

    op: str
    variant: str
    kernel: str
    dtype: torch.dtype
    device: str
    peer: str | None = None
    case: str | None = None
    tokens: int | None = None
    shape: tuple[tuple[str, int], ...] = ()


def prove(claims: Sequence[Claim], workers: Processes | None = None) -> dict[Claim, str]:
    """The verdict on each claim: "ok", "unproven: why" where every case was refused, or "WRONG ...".

    Args:
        workers: where to check; None is this process.
    """
    if workers is None:
        return {claim: verdict_on(claim) for claim in claims}
    verdicts, died = run_apart(_verdict_apart, claims, workers, spoils_device)
    return verdicts | dict.fromkeys(died, _DIED)


def _verdict_apart(claim: Claim) -> str:
    """The verdict, from a process that lives on beside what is timed, and keeps no memory of the device."""
    verdict = verdict_on(claim)
    if claim.device.startswith("cuda") and not spoils_device(verdict):
        torch.cuda.empty_cache()
    return verdict


def cannot_run(verdict: str) -> bool:
    """Whether running the implementation again, here, would end everything else."""
    return verdict == _DIED or spoils_device(verdict)


def verdict_on(claim: Claim) -> str:
    """Check one implementation on what its claim names, until something fails."""
    variant = KERNEL_REGISTRY.op(claim.op).variant(claim.variant)
    try:
        if claim.peer is not None:
            kernel = peer_kernels([claim.peer], claim.op, claim.variant)[claim.kernel]
        else:
            kernel = KERNEL_REGISTRY.load(claim.op, claim.variant, claim.kernel)
    except KernelError as error:
        return f"unproven: {brief(error)}"
    if claim.case is not None:
        return _verdict_at(claim, variant, kernel)
    refusals = []
    for case in variant.cases:
        if case.role != "check":
            continue
        result = check_kernel(kernel, claim.op, variant, case, claim.dtype, claim.device, name=claim.kernel)
        if not result.ok:
            return describe(result)
        refusals.append(result.refused)
    return f"unproven: {brief(refusals[0])}" if refusals and all(refusals) else "ok"


def _verdict_at(claim: Claim, variant: OpVariant, kernel: Callable[..., Any]) -> str:
    if claim.tokens is None:
        case = next(c for c in variant.cases if c.name == claim.case)
    else:
        assert variant.case_at is not None
        case = variant.case_at(dict(claim.shape), claim.tokens)
    device = torch.device(claim.device)
    label = CheckResult(claim.op, claim.variant, claim.kernel, case.name, dtype_name(claim.dtype))
    try:
        expected = expect(variant, case.make(claim.dtype, device, generator_of(device)))
        return describe(compare(kernel, expected, label, by_norm=True))
    except torch.OutOfMemoryError:
        return "unproven: float64 of this case exceeds the memory"


def generator_of(device: torch.device) -> torch.Generator:
    """What the inputs of timed cases are drawn from."""
    return torch.Generator(device=device).manual_seed(0)


def describe(result: CheckResult) -> str:
    """A check's result as a verdict."""
    if result.refused:
        return f"refused: {brief(result.refused)}"
    if result.problem:
        return f"WRONG {result.case}: {brief(result.problem)}"
    worst = result.worst
    if result.ok or worst is None:
        return "ok"
    return f"WRONG {result.case}: {worst.name} error {worst.error:.1e}, bound {worst.bound:.1e}"


def brief(message: Any) -> str:
    """The first line, cut to what fits beside a number."""
    return (str(message).strip().splitlines() or [""])[0][:160]
