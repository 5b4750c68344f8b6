"""Time every implementation of an op against the others and against the roofline, generic over the ops' input cases.

The roofline is the larger of bytes over the measured peak bandwidth and FLOPs over the measured FLOP/s of a large GEMM,
both of this machine. A time counts only beside a passed check: forward and every gradient against fp64 on the op's
check cases, and again on the random inputs that are timed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from opslot._base.device import facts_of
from opslot._base.dtypes import dtype_name
from opslot._base.errors import KernelError
from opslot.bench.baselines import baseline_kernels, load_baselines
from opslot.bench.checks import Check, brief, cannot_run, combine, describe, generator_of, run_checks
from opslot.bench.result import OpRow
from opslot.bench.timing import Time, measure, measure_peak
from opslot.slots import KERNEL_REGISTRY, InputCase, KernelRequest, KernelSpec, OpsImplementationConfig, OpVariant
from opslot.slots.binding import kernel_requests
from opslot.verify.isolated import Processes, most_workers, spoils_device
from opslot.verify.parity import CheckResult, compare, expect, with_leaves

_Kernel = Callable[..., Any]


@dataclass(frozen=True)
class CallSite:
    """An op variant with the static sizes that decide its speed; equal call sites of a model are one."""

    op: str
    variant: str
    shape: tuple[tuple[str, int], ...]


def call_sites_of(model: Any, device: torch.device, dtype: torch.dtype) -> list[CallSite]:
    """The distinct call sites of a model with slots, in the order of its modules; it may be on the meta device."""
    found: dict[CallSite, None] = {}
    for at, request in kernel_requests(model, OpsImplementationConfig.make("auto"), facts_of(device), dtype):
        static_shape = KERNEL_REGISTRY.op(at.op_name).variant(at.variant).static_shape
        shape = static_shape(request) if static_shape else None
        if shape is not None:
            found[CallSite(at.op_name, at.variant, tuple(sorted(shape.items())))] = None
    return list(found)


def bench_ops(
    ops: Sequence[str] = (),
    *,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    call_sites: Sequence[CallSite] | None = None,
    tokens: int | None = None,
    baselines: Sequence[str] = (),
    compiled: bool = True,
    own: bool = True,
    report: Callable[[str], None] | None = None,
) -> Iterator[OpRow]:
    """Check and time eager, torch.compile of eager, every usable kernel and the baselines, forward plus backward.

    Op by op. An op's checks run before it is timed, on a GPU in worker processes: nothing else may run on a device
    while something is timed.

    Args:
        ops: only these, in this order; default all.
        call_sites: only these, at `tokens`; default the shapes of the ops' own bench cases.
        tokens: how many; None takes the bench cases as they are, which are sized for a GPU.
        baselines: libraries whose kernels are not registered (`opslot.bench.baselines.BASELINES`).
        compiled: torch.compile of eager, too.
        own: False leaves all but the baselines out.
        report: called with what is about to be checked, which takes minutes, and with progress.

    Yields:
        One row per (case, implementation), in the order measured.

    Raises:
        ConfigError: unknown op or baseline, or the baseline is not installed.
        KernelError: an implementation left the device unusable; its row comes before.
    """
    load_baselines(baselines)
    target = torch.device(device)
    with contextlib.ExitStack() as stack:
        workers: list[Processes | None] = [None, None]
        if target.type == "cuda":
            # Baselines are checked one at a time, so that a device error of theirs does not fail others.
            workers = [stack.enter_context(Processes(count)) for count in (most_workers(), 1)]
        for op in [KERNEL_REGISTRY.op(name) for name in ops or KERNEL_REGISTRY.ops]:
            planned: list[_Planned] = []
            for variant in op.variants.values():
                setting = _Setting(op.name, variant, target, dtype, tokens)
                cases = list(_cases(op.name, variant, call_sites, tokens))
                candidates = _candidates(setting, compiled) if own and cases else {}
                for baseline in baselines if cases else ():
                    kernels = baseline_kernels([baseline], op.name, variant.name)
                    candidates |= {name: _Candidate(kernel, baseline=baseline) for name, kernel in kernels.items()}
                if candidates:
                    planned.append((setting, cases, candidates))
            if planned:
                yield from _bench_op(op.name, planned, workers, report)


@dataclass(frozen=True)
class _Candidate:
    """An implementation: a registered one, with its spec, a baseline's, or eager code, compiled or not."""

    kernel: _Kernel
    spec: KernelSpec | None = None
    baseline: str | None = None


_Planned = tuple["_Setting", list[InputCase], dict[str, _Candidate]]


def _bench_op(
    name: str,
    planned: Sequence[_Planned],
    workers: Sequence[Processes | None],
    report: Callable[[str], None] | None,
) -> Iterator[OpRow]:
    """Check and time an op.

    Args:
        planned: of each variant, the cases and the implementations.
        workers: where registered kernels are checked, and where baselines are; None is this process.
    """
    checks = [
        check
        for setting, cases, candidates in planned
        for kernel, candidate in candidates.items()
        for check in setting.checks(kernel, candidate, cases)
    ]
    if report is not None:
        checked = ", ".join(dict.fromkeys(check.kernel for check in checks))
        report(f"{name}: checking {checked or 'nothing, there is only eager code'}")
    outcomes: dict[Check, str] = {}
    for of_baselines, where in enumerate(workers):
        outcomes |= run_checks([c for c in checks if bool(c.baseline) == of_baselines], where, report)
    for setting, cases, candidates in planned:
        for case in cases:
            # Eager is the reference; compiled code is checked on what is timed.
            found = {
                kernel: _outcome(setting.checks(kernel, candidate, [case]), outcomes)
                for kernel, candidate in candidates.items()
            }
            yield from _bench_case(setting, case, candidates, found)


def _outcome(checks: Sequence[Check], outcomes: Mapping[Check, str]) -> str:
    """The outcome of a baseline on one case, or of a kernel on all of its check cases."""
    found = [outcomes[check] for check in checks]
    return found[0] if checks and checks[0].baseline else combine(found)


def _cases(
    op_name: str, variant: OpVariant, call_sites: Iterable[CallSite] | None, tokens: int | None
) -> Iterator[InputCase]:
    timed = [case for case in variant.cases if case.role == "bench"]
    if call_sites is None and tokens is None:
        yield from timed
    elif variant.benchmark_case is not None and tokens is not None:
        if call_sites is None:
            shapes = [tuple(sorted(case.shape.items())) for case in timed if case.shape]
        else:
            shapes = [site.shape for site in call_sites if (site.op, site.variant) == (op_name, variant.name)]
        for shape in dict.fromkeys(shapes):
            # A shape that cannot have so many tokens has no case.
            yield variant.benchmark_case(dict(shape), tokens)


def _candidates(setting: _Setting, compiled: bool) -> dict[str, _Candidate]:
    variant = setting.variant
    found = {"eager": _Candidate(variant.reference)}
    if compiled and variant.compiles:
        found["torch.compile"] = _Candidate(torch.compile(variant.reference, dynamic=False))
    request = KernelRequest(setting.op, variant.name, facts_of(setting.device), setting.dtype)
    for spec in KERNEL_REGISTRY.specs(setting.op, variant.name):
        interpreted = spec.interpretable and setting.device.type == "cpu"
        if not interpreted and spec.unsupported(request) is None:
            found[spec.name] = _Candidate(_lazy(spec.key), spec)
    return found


def _lazy(key: tuple[str, str, str]) -> _Kernel:
    """The kernel, loaded when first called: a kernel that cannot load fails in its own row."""

    def kernel(**arguments: Any) -> Any:
        return KERNEL_REGISTRY.load(*key)(**arguments)

    return kernel


@dataclass(frozen=True)
class _Setting:
    """What the implementations of one op variant are measured with."""

    op: str
    variant: OpVariant
    device: torch.device
    dtype: torch.dtype
    tokens: int | None

    def row(self, case: InputCase, kernel: str, candidate: _Candidate) -> OpRow:
        shape = dict(case.shape) if case.shape else None
        return OpRow(
            self.op,
            self.variant.name,
            case.name,
            kernel,
            dtype_name(self.dtype),
            shape=shape,
            tokens=self.tokens if shape else None,
            package="" if candidate.spec is None or candidate.spec.package == "opslot" else candidate.spec.package,
        )

    def checks(self, kernel: str, candidate: _Candidate, cases: Sequence[InputCase]) -> list[Check]:
        """What runs before `cases` are timed; nothing for eager code, compiled or not.

        A baseline is checked on what is timed alone: it need not support other inputs.
        """
        check = Check(self.op, self.variant.name, kernel, "", self.dtype, str(self.device))
        if candidate.spec is not None:
            return [replace(check, case=case.name) for case in self.variant.cases if case.role == "check"]
        if candidate.baseline is None:
            return []
        check = replace(check, baseline=candidate.baseline, tokens=self.tokens)
        return [replace(check, case=c.name, shape=tuple(sorted((c.shape or {}).items()))) for c in cases]


def _bench_case(
    setting: _Setting, case: InputCase, candidates: Mapping[str, _Candidate], checks: Mapping[str, str]
) -> Iterator[OpRow]:
    outcomes = dict(checks) | _check_at_size(setting, case, candidates, checks)
    # A kernel that left the device unusable just now comes first: nothing runs after it.
    for name in sorted(candidates, key=lambda n: not spoils_device(outcomes[n]) or spoils_device(checks[n])):
        row = replace(setting.row(case, name, candidates[name]), check=outcomes[name])
        if not cannot_run(row.check) and not row.check.startswith("unsupported"):
            try:
                row = _timed(setting, case, row, candidates[name].kernel)
            except Exception as error:
                why = f"{type(error).__name__}: {brief(error)}"
                row = row if row.check.startswith("WRONG") else replace(row, check=why)
            _release(setting.device)
        yield row
        if spoils_device(row.check) and not spoils_device(checks[name]):
            raise KernelError(
                f"{name} left the device unusable at {case.name}",
                found=row.check,
                hint="start again without it; what was measured before it is kept",
            )


def _release(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _timed(setting: _Setting, case: InputCase, row: OpRow, kernel: _Kernel) -> OpRow:
    """The row with its times; fresh inputs for each implementation, since some write over theirs."""
    arguments = case.make(setting.dtype, setting.device, generator_of(setting.device))
    time, peak = time_forward_backward(kernel, setting.variant, arguments, setting.device)
    roofline = _roofline_ms(setting, arguments)
    return replace(row, ms=time.ms, wall_ms=time.wall_ms, roofline_ms=roofline, peak_mib=peak)


_TOO_LARGE = "ok (on the check cases; the fp64 reference of this one exceeds the memory)"


def _check_at_size(
    setting: _Setting, case: InputCase, candidates: Mapping[str, _Candidate], checks: Mapping[str, str]
) -> dict[str, str]:
    """Check each implementation that passed the small cases on the inputs that will be timed."""
    asked = {n: c for n, c in candidates.items() if n != "eager" and not c.baseline and checks[n] == "ok"}
    found: dict[str, str] = {}
    try:
        arguments = case.make(setting.dtype, setting.device, generator_of(setting.device))
        expected = expect(setting.variant, arguments) if asked else None
    except torch.OutOfMemoryError:
        expected = None
    for name, candidate in asked.items():
        found[name] = _TOO_LARGE
        if expected is not None:
            label = CheckResult(setting.op, setting.variant.name, name, case.name, dtype_name(setting.dtype))
            # A kernel of the optimizer writes over its arguments.
            copies = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, expected.arguments)
            allowed = candidate.spec.relative_error if candidate.spec is not None else 0.0
            own = replace(expected, arguments=copies)
            result = compare(candidate.kernel, own, label, by_norm=True, relative_error=allowed)
            if not result.problem.startswith("raised OutOfMemoryError"):
                found[name] = describe(result)
    if candidates.get("torch.compile") and expected is None:
        # It has no other check.
        found["torch.compile"] = "unchecked: the fp64 reference of this case exceeds the memory"
    del expected
    _release(setting.device)
    return found


def _roofline_ms(setting: _Setting, arguments: dict[str, Any]) -> float | None:
    if setting.variant.cost is None:
        return None
    cost, peak = setting.variant.cost(arguments), measure_peak(setting.device, setting.dtype)
    return 1e3 * max(cost.bytes / peak.bytes_per_s, cost.flops / peak.flops_per_s)


def time_forward_backward(
    kernel: _Kernel, variant: OpVariant, arguments: dict[str, Any], device: torch.device
) -> tuple[Time, float | None]:
    """Time of forward plus backward with random incoming gradients, and MiB allocated above the inputs (on CUDA)."""
    call, leaves = with_leaves(arguments, variant.differentiable)
    grads: list[Tensor] = []

    def step() -> None:
        outputs = [o for o in tree_flatten(kernel(**call))[0] if isinstance(o, Tensor) and o.requires_grad]
        if not grads:
            grads.extend(torch.randn_like(o) for o in outputs)
        if outputs:
            torch.autograd.grad(outputs, [x for _, x in leaves], grads, allow_unused=True)

    step()
    peak = None
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return measure(step, device), peak
