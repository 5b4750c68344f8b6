"""`opslot verify`: prove the kernels of this machine, one line each."""

from __future__ import annotations

import json
from dataclasses import asdict

from opslot._base.errors import ConfigError
from opslot.slots import KERNEL_REGISTRY, format_table
from opslot.verify import CheckResult, verify_kernels


def run(op: str | None, kernel: str | None, device: str | None, seed: int, workers: int | None, as_json: bool) -> int:
    """Print one row per kernel and dtype with its worst comparison; exit code 1 when any check fails."""
    if workers is not None and workers < 0:
        raise ConfigError(f"--workers {workers}: it takes 0 or more")
    ops: list[str | None] = [name.strip() for name in op.split(",")] if op else [None]
    results = [r for name in ops for r in verify_kernels(name, kernel, device=device, seed=seed, workers=workers)]
    if not results:
        raise ConfigError(_nothing(op, kernel))
    failed = [r for r in results if not r.ok]
    if as_json:
        print(json.dumps([{**asdict(r), "ok": r.ok} for r in results], indent=2))
        return 1 if failed else 0
    header = ("op", "variant", "kernel", "dtype", "cases", "verdict", "worst of: error, eager's error, bound")
    print("\n".join(format_table(header, _rows(results))))
    for result, more in _distinct(failed):
        print(f"FAILED {result}" + (f" (and {more} more cases alike)" if more else ""))
    refused = sum(bool(r.refused) for r in results)
    print(
        f"{len(results) - len(failed) - refused} of {len(results)} checks passed"
        + (f", {refused} refused by their kernels" if refused else "")
    )
    return 1 if failed or refused == len(results) else 0


def _distinct(failed: list[CheckResult]) -> list[tuple[CheckResult, int]]:
    """The failures, those that say the same of one kernel once, with the number of the others."""
    groups: dict[tuple[str, ...], list[CheckResult]] = {}
    for r in failed:
        groups.setdefault((r.op, r.variant, r.kernel, r.dtype, r.problem or r.case), []).append(r)
    return [(group[0], len(group) - 1) for group in groups.values()]


def _rows(results: list[CheckResult]) -> list[tuple[str, ...]]:
    groups: dict[tuple[str, str, str, str], list[CheckResult]] = {}
    for r in results:
        groups.setdefault((r.op, r.variant, r.kernel, r.dtype), []).append(r)
    return [(*key, _count(group), _verdict(group), _worst(group)) for key, group in groups.items()]


def _count(group: list[CheckResult]) -> str:
    refused = sum(bool(r.refused) for r in group)
    return f"{len(group)}, {refused} refused" if refused else str(len(group))


def _verdict(group: list[CheckResult]) -> str:
    if all(r.refused for r in group):
        return "unproven"
    return "ok" if all(r.ok for r in group) else "WRONG"


def _worst(group: list[CheckResult]) -> str:
    problem = next((r for r in group if r.problem), None)
    if problem is not None:
        return f"{problem.case}: {problem.problem}"
    found = [(w.error / w.bound if w.bound else 0.0, r.case, w) for r in group if (w := r.worst) is not None]
    if not found:
        return ""
    _, case, worst = max(found, key=lambda f: f[0])
    return f"{case}, {worst.name}: {worst.error:.1e}, {worst.eager_error:.1e}, {worst.bound:.1e}"


def _nothing(op: str | None, kernel: str | None) -> str:
    wanted = " ".join(x for x in (f"op {op!r}" if op else "", f"kernel {kernel!r}" if kernel else "") if x) or "any op"
    names = sorted({s.name for s in KERNEL_REGISTRY.specs(op)}) or ["only eager"]
    return (
        f"no kernel of {wanted} can run on this machine; registered: {', '.join(names)} "
        "(opslot kernels says what each needs)"
    )
