"""Proofs of many kernels at once, in processes of their own on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opslot._base.dtypes import dtype_name
from opslot._base.errors import KernelError
from opslot.bench.baselines import peer_kernels
from opslot.slots import KERNEL_REGISTRY, OpVariant
from opslot.verify.isolated import Lost, Processes, spoils_device
from opslot.verify.parity import CheckResult, check_kernel, compare, expect

_DIED = "WRONG: the process that checked it died"
# A kernel that compiles for longer at one shape serves nobody; the start of a process is in it.
_LIMIT_S = 180.0
_TELL_S = 15.0


@dataclass(frozen=True)
class Claim:
    """What is to be proven: that an implementation computes what the op's reference does, in one dtype, on one case.

    Attributes:
        kernel: a registered kernel's name, or a peer's as `peer_kernels` calls it.
        case: a check case's name; for a peer a bench case's, or what `tokens` and `shape` make.
        peer: the peer, for a peer's.
    """

    op: str
    variant: str
    kernel: str
    dtype: torch.dtype
    device: str
    case: str
    peer: str | None = None
    tokens: int | None = None
    shape: tuple[tuple[str, int], ...] = ()


def prove(
    claims: Sequence[Claim], workers: Processes | None = None, say: Callable[[str], None] | None = None
) -> dict[Claim, str]:
    """The verdict on each claim: "ok", "refused: why" or "WRONG ...", or "unproven: why" where it took too long.

    Args:
        workers: where to check; None is this process.
        say: told now and then how many are done.
    """
    if workers is None:
        return {claim: verdict_on(claim) for claim in claims}
    verdicts: dict[Claim, str] = {}
    told = time.monotonic()
    for claim, verdict in workers.run(_verdict_apart, claims, spoils_device, _LIMIT_S):
        verdicts[claim] = _lost(verdict) if isinstance(verdict, Lost) else verdict
        if say is not None and time.monotonic() - told > _TELL_S:
            told = time.monotonic()
            say(f"{len(verdicts)} of {len(claims)} proofs done")
    return verdicts


def _lost(why: Lost) -> str:
    return _DIED if why == "died" else f"unproven: its check {why}"


def summed_up(verdicts: Sequence[str]) -> str:
    """One verdict on a kernel from those on all of its check cases, in their order.

    "unproven: why" where every case was refused.
    """
    if bad := [v for v in verdicts if v != "ok" and not v.startswith("refused")]:
        return bad[0]
    if verdicts and "ok" not in verdicts:
        return verdicts[0].replace("refused", "unproven", 1)
    return "ok"


def _verdict_apart(claim: Claim) -> str:
    """The verdict, from a process that lives on beside what is timed, and keeps no memory of the device."""
    verdict = verdict_on(claim)
    if claim.device.startswith("cuda") and not spoils_device(verdict):
        torch.cuda.empty_cache()
    return verdict


def cannot_run(verdict: str) -> bool:
    """Whether running the implementation again, here, would end everything else or take too long."""
    return verdict == _DIED or spoils_device(verdict) or verdict.startswith("unproven: its check was not done")


def verdict_on(claim: Claim) -> str:
    """Check one implementation on what its claim names."""
    variant = KERNEL_REGISTRY.op(claim.op).variant(claim.variant)
    try:
        if claim.peer is not None:
            return _verdict_at(claim, variant, peer_kernels([claim.peer], claim.op, claim.variant)[claim.kernel])
        kernel = KERNEL_REGISTRY.load(claim.op, claim.variant, claim.kernel)
    except KernelError as error:
        return f"unproven: {brief(error)}"
    case = variant.case(claim.case)
    return describe(check_kernel(kernel, claim.op, variant, case, claim.dtype, claim.device, name=claim.kernel))


def _verdict_at(claim: Claim, variant: OpVariant, kernel: Callable[..., Any]) -> str:
    if claim.tokens is None:
        case = variant.case(claim.case)
    else:
        assert variant.benchmark_case is not None
        case = variant.benchmark_case(dict(claim.shape), claim.tokens)
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
