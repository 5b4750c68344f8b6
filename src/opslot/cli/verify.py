"""`opslot verify`: check the kernels that this machine can run."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from opslot._base.dtypes import floating_dtype
from opslot._base.errors import ConfigError
from opslot.slots import KERNEL_REGISTRY, format_table
from opslot.verify import CheckResult, verify_kernels
from opslot.verify.kernels import DTYPES

_REPORT_S = 10.0
_INTERRUPTED = 130


def run(options: argparse.Namespace) -> int:
    """Print one row per kernel and dtype with its worst comparison; exit code 1 when a check fails."""
    kernel, workers = options.kernel, options.workers
    ops = options.op
    dtypes = [floating_dtype(name, f"--dtype {name!r}") for name in options.dtype] or DTYPES
    results: list[CheckResult] = []
    interrupted = False
    try:
        checks = verify_kernels(ops, kernel, device=options.device, dtypes=dtypes, seed=options.seed, workers=workers)
        for result in _reported(checks):
            results.append(result)
    except KeyboardInterrupt:
        interrupted = True
    if not results and not interrupted:
        raise _no_kernel(ops, kernel)
    failed = [r for r in results if not r.ok]
    unsupported = sum(bool(r.unsupported) for r in results)
    if options.json:
        print(json.dumps([{**asdict(r), "ok": r.ok} for r in results], indent=2))
        return _INTERRUPTED if interrupted else int(bool(failed))
    header = ("op", "variant", "kernel", "dtype", "cases", "check", "worst case: error, eager's error, bound")
    print("\n".join(format_table(header, _rows(results))))
    for result, more in _distinct(failed):
        print(f"FAILED {result}" + (f" (and {more} more cases)" if more else ""))
    passed = len(results) - len(failed) - unsupported
    counts = [f"{passed} passed", *([f"{len(failed)} failed"] if failed else [])]
    counts += [f"{unsupported} unsupported by their kernels"] if unsupported else []
    ended = ", interrupted" if interrupted else ""
    print(f"{len(results)} checks against an fp64 reference: {', '.join(counts)}{ended}")
    if interrupted:
        return _INTERRUPTED
    return 1 if failed or unsupported == len(results) else 0


def _reported(results: Iterator[CheckResult]) -> Iterator[CheckResult]:
    """The results; failures, and now and then how many checks are done, are printed to stderr at once."""
    failed = 0
    reported = time.monotonic()
    for done, result in enumerate(results, 1):
        if not result.ok:
            failed += 1
            print(f"FAILED {result}", file=sys.stderr, flush=True)
        if time.monotonic() - reported > _REPORT_S:
            reported = time.monotonic()
            print(f"{done} checks done, {failed} failed", file=sys.stderr, flush=True)
        yield result


def _distinct(failed: list[CheckResult]) -> list[tuple[CheckResult, int]]:
    """One failure for each message of a kernel, with the number of other cases that have the same."""
    groups: dict[tuple[str, ...], list[CheckResult]] = {}
    for r in failed:
        groups.setdefault((r.op, r.variant, r.kernel, r.dtype, r.problem or r.case), []).append(r)
    return [(group[0], len(group) - 1) for group in groups.values()]


def _rows(results: list[CheckResult]) -> list[tuple[str, ...]]:
    groups: dict[tuple[str, str, str, str], list[CheckResult]] = {}
    for r in results:
        groups.setdefault((r.op, r.variant, r.kernel, r.dtype), []).append(r)
    return [(*key, _count(group), _outcome(group), _worst(group)) for key, group in groups.items()]


def _count(group: list[CheckResult]) -> str:
    unsupported = sum(bool(r.unsupported) for r in group)
    return f"{len(group)}, {unsupported} unsupported" if unsupported else str(len(group))


def _outcome(group: list[CheckResult]) -> str:
    if all(r.unsupported for r in group):
        return "unsupported"
    return "passed" if all(r.ok for r in group) else "failed"


def _worst(group: list[CheckResult]) -> str:
    problem = next((r for r in group if r.problem), None)
    if problem is not None:
        return f"{problem.case}: {problem.problem}"
    found = [(w.error / w.bound if w.bound else 0.0, r.case, w) for r in group if (w := r.worst) is not None]
    if not found:
        return ""
    _, case, worst = max(found, key=lambda f: f[0])
    return f"{case}, {worst.name}: {worst.error:.1e}, {worst.eager_error:.1e}, {worst.bound:.1e}"


def _no_kernel(ops: Sequence[str] | None, kernel: str | None) -> ConfigError:
    wanted = f"kernel {kernel!r}" if kernel else "kernel"
    of = f" of {', '.join(map(repr, ops))}" if ops else ""
    names = sorted({s.name for s in KERNEL_REGISTRY.specs() if ops is None or s.op_name in ops})
    return ConfigError(
        f"no {wanted}{of} can run on this machine",
        found=f"registered: {', '.join(names) or 'only eager'}",
        hint="`opslot kernels` shows what each requires",
    )
