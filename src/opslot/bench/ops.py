"""Time every implementation of an op against each other and against the floor, generic over the ops' input cases.

The floor is the larger of bytes over the measured copy bandwidth and FLOPs over the measured rate of a large matrix
product, both of this machine. A number counts only beside a proof: forward and every gradient against fp64 on the op's
check cases, and again on the random inputs that were timed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from opslot._base.device import facts_of
from opslot._base.dtypes import dtype_name
from opslot._base.errors import KernelError
from opslot.bench.baselines import load_peers, peer_kernels
from opslot.bench.checks import Claim, brief, cannot_run, describe, generator_of, prove, summed_up
from opslot.bench.rows import BenchRow
from opslot.bench.timing import Time, measure, measure_ceilings
from opslot.slots import KERNEL_REGISTRY, InputCase, KernelRequest, OpVariant, walk_slots
from opslot.verify.isolated import Processes, most_workers, spoils_device
from opslot.verify.parity import CheckResult, Expectation, compare, expect

_Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Site:
    """A place of a model where a kernel stands, as far as speed goes; equal places are one."""

    op: str
    variant: str
    shape: tuple[tuple[str, int], ...]


def sites_of(model: Any, device: torch.device, dtype: torch.dtype) -> list[Site]:
    """The distinct sites of a model with slots, in the order of its modules; it may be on the meta device."""
    config = getattr(model, "config", None)
    asked = [(op, variant, module) for _, module, _, op, variant in walk_slots(model)]
    for op in KERNEL_REGISTRY.ops.values():
        if op.applies_to is not None and op.applies_to(model):
            asked.append((op.name, next(iter(op.variants)), model))
    found: dict[Site, None] = {}
    for op_name, variant, module in asked:
        static_shape = KERNEL_REGISTRY.op(op_name).variant(variant).static_shape
        request = KernelRequest(op_name, variant, facts_of(device), dtype, module, config)
        shape = static_shape(request) if static_shape else None
        if shape is not None:
            found[Site(op_name, variant, tuple(sorted(shape.items())))] = None
    return list(found)


def bench(
    ops: Sequence[str] = (),
    *,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    sites: Sequence[Site] | None = None,
    tokens: int | None = None,
    against: Sequence[str] = (),
    compiled: bool = True,
    own: bool = True,
    say: Callable[[str], None] | None = None,
) -> Iterator[BenchRow]:
    """Prove and time eager, torch.compile of eager, every usable kernel and the peers, forward plus backward.

    Op by op. An op's proofs come before its times, in processes of their own on a GPU: nothing else may run on a device
    while something is timed.

    Args:
        ops: only these, in this order; default all.
        sites: only these, at `tokens`; default the shapes of the ops' own bench cases.
        tokens: how many; None takes the bench cases as they are, which are meant for a GPU.
        against: peers whose kernels are no registered implementation (`opslot.bench.baselines.BASELINES`).
        compiled: torch.compile of eager, too.
        own: False leaves all but the peers out.
        say: told what is about to be proven, which takes minutes, and how far that is.

    Yields:
        One row per (case, implementation), in the order measured.

    Raises:
        ConfigError: there is no such op or peer, or the peer is not installed.
        KernelError: an implementation left the device unsupported; its row comes before.
    """
    load_peers(against)
    place = torch.device(device)
    plan = _planned(ops, place, dtype, sites, tokens, against, compiled, own)
    with contextlib.ExitStack() as stack:
        checkers = _Checkers(None, None)
        if place.type == "cuda":
            checkers = _Checkers(*(stack.enter_context(Processes(count)) for count in (most_workers(), 1)))
        for name, group in itertools.groupby(plan, lambda planned: planned[0].op):
            settings = list(group)
            if say is not None:
                say(f"{name}: proofs of {', '.join(_named(settings)) or 'nothing, there is only eager code'}")
            verdicts = _verdicts(settings, checkers, say)
            for setting, cases, candidates in settings:
                for case in cases:
                    proofs = {
                        # Eager is what others are measured by; compiled code is proven on what is timed, a graph a
                        # shape.
                        kernel: _proof(setting.claims(kernel, candidate, [case]), verdicts)
                        for kernel, candidate in candidates.items()
                    }
                    yield from _bench_case(setting, case, candidates, proofs)


@dataclass(frozen=True)
class _Checkers:
    """Where kernels are proven, and where peers are: None is this process.

    Peers one at a time, since what they do to the device must not be ours.
    """

    own: Processes | None
    peers: Processes | None


def _named(settings: Sequence[_Planned]) -> list[str]:
    """The implementations that have something to prove."""
    return list(dict.fromkeys(n for _, _, found in settings for n, c in found.items() if c.registered or c.peer))


@dataclass(frozen=True)
class _Candidate:
    """An implementation: a registered one, a peer's, or eager code, compiled or not."""

    kernel: _Kernel
    registered: bool = False
    peer: str | None = None


_Planned = tuple["_Setting", list[InputCase], dict[str, _Candidate]]


def _planned(
    ops: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    sites: Sequence[Site] | None,
    tokens: int | None,
    against: Sequence[str],
    compiled: bool,
    own: bool,
) -> Iterator[_Planned]:
    """Of each variant with anything to time: the cases and the implementations."""
    for spec_op in map(KERNEL_REGISTRY.op, ops or KERNEL_REGISTRY.ops):
        for variant in spec_op.variants.values():
            setting = _Setting(spec_op.name, variant, device, dtype, tokens)
            cases = list(_cases(spec_op.name, variant, sites, tokens))
            if not cases:
                continue
            candidates = _candidates(setting, compiled) if own else {}
            for peer in against:
                candidates |= _peer_candidates(setting, peer)
            if candidates:
                yield setting, cases, candidates


def _verdicts(plan: Sequence[_Planned], checkers: _Checkers, say: Callable[[str], None] | None) -> dict[Claim, str]:
    """Proofs of the registered kernels, and of the peers'."""
    claims = [
        claim
        for setting, cases, candidates in plan
        for kernel, candidate in candidates.items()
        for claim in setting.claims(kernel, candidate, cases)
    ]
    own = [claim for claim in claims if not claim.peer]
    of_peers = [claim for claim in claims if claim.peer]
    return prove(own, checkers.own, say) | prove(of_peers, checkers.peers, say)


def _proof(claims: Sequence[Claim], verdicts: Mapping[Claim, str]) -> str:
    """The verdict that a peer has on one case, or that a kernel has on all of its check cases."""
    found = [verdicts[claim] for claim in claims]
    return found[0] if claims and claims[0].peer else summed_up(found)


def _cases(op_name: str, variant: OpVariant, sites: Iterable[Site] | None, tokens: int | None) -> Iterator[InputCase]:
    timed = [case for case in variant.cases if case.role == "bench"]
    if sites is None and tokens is None:
        yield from timed
    elif variant.benchmark_case is not None and tokens is not None:
        if sites is None:
            shapes = [tuple(sorted(case.shape.items())) for case in timed if case.shape]
        else:
            shapes = [site.shape for site in sites if (site.op, site.variant) == (op_name, variant.name)]
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
            found[spec.name] = _Candidate(_late(spec.key), registered=True)
    return found


def _late(key: tuple[str, str, str]) -> _Kernel:
    """The kernel, loaded when first called: one that cannot load is its own row's failure."""

    def kernel(**arguments: Any) -> Any:
        return KERNEL_REGISTRY.load(*key)(**arguments)

    return kernel


def _peer_candidates(setting: _Setting, peer: str) -> dict[str, _Candidate]:
    kernels = peer_kernels([peer], setting.op, setting.variant.name)
    return {name: _Candidate(kernel, peer=peer) for name, kernel in kernels.items()}


@dataclass(frozen=True)
class _Setting:
    """What the implementations of one op variant are measured with."""

    op: str
    variant: OpVariant
    device: torch.device
    dtype: torch.dtype
    tokens: int | None

    def row(self, case: InputCase, kernel: str) -> BenchRow:
        shape = dict(case.shape) if case.shape else None
        tokens = self.tokens if shape else None
        return BenchRow(
            self.op, self.variant.name, case.name, kernel, dtype_name(self.dtype), shape=shape, tokens=tokens
        )

    def claims(self, kernel: str, candidate: _Candidate, cases: Sequence[InputCase]) -> list[Claim]:
        """What must be proven before `cases` are timed; nothing of eager code, compiled or not.

        A peer is proven on what is timed, since what it does with other inputs is its users' business.
        """
        claim = Claim(self.op, self.variant.name, kernel, self.dtype, str(self.device), "")
        if candidate.registered:
            return [replace(claim, case=case.name) for case in self.variant.cases if case.role == "check"]
        if candidate.peer is None:
            return []
        claim = replace(claim, peer=candidate.peer, tokens=self.tokens)
        return [replace(claim, case=c.name, shape=tuple(sorted((c.shape or {}).items()))) for c in cases]


def _bench_case(
    setting: _Setting, case: InputCase, candidates: Mapping[str, _Candidate], proofs: Mapping[str, str]
) -> Iterator[BenchRow]:
    for row in _case_rows(setting, case, candidates, proofs):
        yield row
        if spoils_device(row.verdict) and not spoils_device(proofs[row.kernel]):
            raise KernelError(
                f"{row.kernel} left the device unsupported at {case.name}: {row.verdict}",
                hint="start again without it; what was measured before it is kept",
            )


def _case_rows(
    setting: _Setting, case: InputCase, candidates: Mapping[str, _Candidate], proofs: Mapping[str, str]
) -> Iterator[BenchRow]:
    verdicts = dict(proofs) | _prove_at_size(setting, case, candidates, proofs)
    # One that spoiled the device just now comes first: nothing runs after it.
    for name in sorted(candidates, key=lambda n: not spoils_device(verdicts[n]) or spoils_device(proofs[n])):
        row = replace(setting.row(case, name), verdict=verdicts[name])
        if not cannot_run(row.verdict) and not row.verdict.startswith("refused"):
            try:
                row = _timed(setting, case, row, candidates[name].kernel)
            except Exception as error:
                why = f"{type(error).__name__}: {brief(error)}"
                row = row if row.verdict.startswith("WRONG") else replace(row, verdict=why)
            _release(setting.device)
        yield row


def _release(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _timed(setting: _Setting, case: InputCase, row: BenchRow, kernel: _Kernel) -> BenchRow:
    """The row with its times; fresh inputs for each implementation, since some write over theirs."""
    arguments = case.make(setting.dtype, setting.device, generator_of(setting.device))
    time, peak = time_both_ways(kernel, setting.variant, arguments, setting.device)
    floor = _floor_ms(setting, arguments)
    return replace(row, ms=time.ms, alone_ms=time.alone_ms, floor_ms=floor, peak_mib=peak)


_TOO_LARGE = "ok (on the check cases; float64 of this one exceeds the memory)"


def _prove_at_size(
    setting: _Setting, case: InputCase, candidates: Mapping[str, _Candidate], proofs: Mapping[str, str]
) -> dict[str, str]:
    """The verdict of each implementation on the inputs that will be timed, where the small cases left it right."""
    asked = {n: c for n, c in candidates.items() if n != "eager" and not c.peer and proofs[n] == "ok"}
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
            own = replace(expected, arguments=_copies(expected))
            result = compare(candidate.kernel, own, label, by_norm=True)
            if not result.problem.startswith("raised OutOfMemoryError"):
                found[name] = describe(result)
    if candidates.get("torch.compile") and expected is None:
        # It has no other proof.
        found["torch.compile"] = "unproven: float64 of this case exceeds the memory"
    del expected
    _release(setting.device)
    return found


def _copies(expected: Expectation) -> dict[str, Any]:
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, expected.arguments)


def _floor_ms(setting: _Setting, arguments: dict[str, Any]) -> float | None:
    if setting.variant.cost is None:
        return None
    cost, ceilings = setting.variant.cost(arguments), measure_ceilings(setting.device, setting.dtype)
    return 1e3 * max(cost.bytes / ceilings.bytes_per_s, cost.flops / ceilings.flops_per_s)


def time_both_ways(
    kernel: _Kernel, variant: OpVariant, arguments: dict[str, Any], device: torch.device
) -> tuple[Time, float | None]:
    """Time of forward plus backward with random incoming gradients, and MiB allocated above the inputs (on CUDA)."""
    leaves: list[Tensor] = []

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor) and x.dtype.is_floating_point:
            x = x.detach().requires_grad_()
            leaves.append(x)
        return x

    call = {n: tree_map(leaf, v) if n in variant.differentiable else v for n, v in arguments.items()}
    grads: list[Tensor] = []

    def step() -> None:
        outputs = [o for o in tree_flatten(kernel(**call))[0] if isinstance(o, Tensor) and o.requires_grad]
        if not grads:
            grads.extend(torch.randn_like(o) for o in outputs)
        if outputs:
            torch.autograd.grad(outputs, leaves, grads, allow_unused=True)

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
