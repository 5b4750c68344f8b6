"""Check of a kernel: forward and every gradient against an fp64 reference, with the error of same-dtype eager code.

A kernel passes where its largest error is at most

    2 x eager's largest error + tolerance_ulps x eps x scale

on one random draw of the case or, where it is not, in the mean over `DRAWS` draws. `eps` is that of the output's dtype,
`tolerance_ulps` that of the variant (1 by default), and `scale` the largest output of the case (for a
gradient, its largest gradient), since an element that cancels to nearly nothing is still a sum of terms of that size.

The error of eager gives the size of the bound, not a formula for each op: on the same arguments, it has the same
lengths of sums, products and internal steps in the same dtype. One draw does not decide, because rounding depends on
the order of summation, and so on the CPU, its BLAS and the number of threads: of two normal variables of equal width,
one is more than twice the other with probability (2 / pi) atan(1 / 2) = 0.30. In the mean of 16 draws, a kernel with
the same distribution of errors as eager is 2.4 standard deviations or more below 2 x eager's mean. Wrong code is wrong
on every draw: in fp32, a relative error of 1e-3 is 8,000 eps; accumulation in bf16 has an eps 65,536 times as large.
"""

from __future__ import annotations

import itertools
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from opslot._base.dtypes import dtype_name
from opslot._base.errors import KernelError
from opslot.slots import InputCase, OpVariant

EAGER_FACTOR = 2.0
DRAWS = 16
_LARGE = 2**20
# Between the seeds of two draws: more than a case has tensors, which take consecutive seeds.
_DRAW_STRIDE = 1000


@dataclass(frozen=True)
class Comparison:
    """One tensor of a check ("out[1]", "grad weight"): the errors of the kernel and of eager, and the bound."""

    name: str
    error: float
    eager_error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound

    def __str__(self) -> str:
        return f"{self.name}, error {self.error:.2e}, eager {self.eager_error:.2e}, bound {self.bound:.2e}"


@dataclass(frozen=True)
class CheckResult:
    """One kernel on one input case.

    Attributes:
        comparisons: one per output and gradient.
        problem: why there are none: the kernel raised, or shape or dtype differ from the reference's.
        unsupported: the kernel's own `KernelError`, if it does not support the case: no failure, but nothing checked.
        draws: of the case that the comparisons are the mean of.
    """

    op: str
    variant: str
    kernel: str
    case: str
    dtype: str
    comparisons: tuple[Comparison, ...] = ()
    problem: str = ""
    unsupported: str = ""
    draws: int = 1

    @property
    def ok(self) -> bool:
        return not self.problem and all(c.ok for c in self.comparisons)

    @property
    def worst(self) -> Comparison | None:
        """The comparison nearest to its bound, or furthest over it."""
        return nearest(self.comparisons) if self.comparisons else None

    def __str__(self) -> str:
        head = f"{self.op}/{self.variant} {self.kernel} [{self.case}, {self.dtype}]"
        if self.problem or self.unsupported:
            return f"{head}: {f'failed, {self.problem}' if self.problem else f'unsupported: {self.unsupported}'}"
        worst = self.worst
        if worst is None:
            return f"{head}: passed"
        mean = f" (mean of {self.draws} draws)" if self.draws > 1 else ""
        figures = f"error {worst.error:.2e}, eager {worst.eager_error:.2e}, bound {worst.bound:.2e}{mean}"
        return f"{head}: {'passed' if self.ok else 'failed'}, {worst.name} {figures}"


def check_kernel(
    kernel: Callable[..., Any],
    op_name: str,
    variant: OpVariant,
    case: InputCase,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    name: str = "kernel",
    seed: int = 0,
    relative_error: float = 0.0,
) -> CheckResult:
    """Compare `kernel` with `variant.reference` on `case`; an exception of the kernel is a failed check.

    New memory is filled with NaN while the kernel runs, so that an element it does not write fails the check.

    Args:
        relative_error: of the kernel's `KernelSpec`.
        case: drawn once; where that draw is beyond its bound, `DRAWS` times, and the means are compared.
    """
    device = torch.device(device)
    label = CheckResult(op_name, variant.name, name, case.name, dtype_name(dtype))
    # Not hash(): it differs between processes, and a failure must be repeatable.
    base = zlib.crc32("/".join((op_name, variant.name, name, case.name, label.dtype)).encode())

    def draw(number: int) -> CheckResult:
        own = seed + number * _DRAW_STRIDE
        arguments = case.make(dtype, device, torch.Generator().manual_seed(own + base))
        return compare(kernel, expect(variant, arguments, own), label, relative_error=relative_error)

    first = draw(0)
    if first.ok or not first.comparisons:
        return first
    results = [first]
    for number in range(1, DRAWS):
        results.append(draw(number))
        if not results[-1].comparisons:
            return results[-1]
    return replace(first, comparisons=mean_of([r.comparisons for r in results]), draws=DRAWS)


def nearest(comparisons: Iterable[Comparison]) -> Comparison:
    """The comparison nearest to its bound, or furthest over it."""
    return max(comparisons, key=lambda c: c.error / c.bound if c.bound else float(c.error > 0))


def mean_of(draws: Sequence[Sequence[Comparison]]) -> tuple[Comparison, ...]:
    """The comparisons of several draws as those of one: means of the errors and of the bounds.

    A draw may lack gradients, such as those of experts where no token is routed to one.
    """
    by_name: dict[str, list[Comparison]] = {}
    for comparison in itertools.chain(*draws):
        by_name.setdefault(comparison.name, []).append(comparison)

    def mean(same: Sequence[Comparison]) -> Comparison:
        figures = zip(*((c.error, c.eager_error, c.bound) for c in same))
        return Comparison(same[0].name, *(sum(x) / len(same) for x in figures))

    return tuple(map(mean, by_name.values()))


@dataclass(frozen=True)
class Expectation:
    """Results of the reference for one call.

    Attributes:
        arguments: the call's.
        eager, fp64: outputs and gradients by name, computed in the arguments' dtypes and in float64.
    """

    variant: OpVariant
    arguments: dict[str, Any]
    seed: int
    eager: dict[str, Tensor]
    fp64: dict[str, Tensor]


def expect(variant: OpVariant, arguments: dict[str, Any], seed: int = 0) -> Expectation:
    """Run the reference on `arguments` as they are and in float64."""
    eager = _run(variant, variant.reference, arguments, seed)
    fp64 = _run(variant, variant.reference, double(arguments), seed, eager)
    return Expectation(variant, arguments, seed, eager, fp64)


def compare(
    kernel: Callable[..., Any],
    expected: Expectation,
    label: CheckResult,
    *,
    by_norm: bool = False,
    relative_error: float = 0.0,
) -> CheckResult:
    """Return `label` with the comparisons of `kernel` on the same arguments, or with the exception it raised.

    Args:
        by_norm: compare root mean squares instead of largest elements, and allow half an ULP of the case's dtype: for
            large cases, where the largest of 10^8 errors is mostly luck. `check_kernel` compares every element of small
            cases.
        relative_error: of the kernel's `KernelSpec`; if not 0, root mean squares are compared with it alone.
    """
    try:
        with poisoned_memory():
            got = _run(expected.variant, kernel, expected.arguments, expected.seed)
    except KernelError as error:
        return replace(label, unsupported=str(error))
    except Exception as error:
        return replace(label, problem=f"raised {type(error).__name__}: {error}")
    fp64 = expected.fp64
    scales = {kind: _largest(t for key, t in fp64.items() if key.startswith("grad") == kind) for kind in (True, False)}
    allowed = expected.variant.tolerance_ulps.get(label.dtype, 1.0)
    relative = relative_error or allowed * torch.finfo(getattr(torch, label.dtype)).eps / 2
    comparisons = []
    for key, wanted in expected.eager.items():
        mismatch = _mismatch(got.get(key), wanted)
        if mismatch:
            return replace(label, problem=f"{key}: {mismatch}")
        if relative_error or by_norm:
            known = fp64[key] if fp64[key].isfinite().all() else fp64[key].nan_to_num(0.0, 0.0, 0.0)
            size, rounding = rms, relative * rms(known)
        else:
            eps = torch.finfo(wanted.dtype).eps if wanted.is_floating_point() else 0.0
            size, rounding = _largest_element, eps * (allowed * scales[key.startswith("grad")])
        factor = 0.0 if relative_error else EAGER_FACTOR
        comparisons.append(_compare(key, got[key], wanted, fp64[key], size, rounding, factor))
    return replace(label, comparisons=tuple(comparisons))


def _run(
    variant: OpVariant,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    seed: int,
    eager: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Outputs and gradients by name; every function gets the same random incoming gradients.

    Args:
        eager: results of the reference on the arguments as they are. Incoming gradients are rounded to the dtypes of
            these outputs: otherwise that rounding would count as an error of the kernel.
    """
    call, leaves = with_leaves(arguments, variant.differentiable)
    outputs = [o for o in tree_flatten(function(**call))[0] if isinstance(o, Tensor)]
    named = {"out" if len(outputs) == 1 else f"out[{i}]": o for i, o in enumerate(outputs)}
    rooted = [o for o in outputs if o.requires_grad]
    if rooted:
        # Seeds count all outputs: a kernel's output may require a gradient where the reference's does not.
        dtypes = [(eager or named)[name].dtype for name in named]
        grads = [
            _incoming(o, seed + 1 + i).to(dtype).to(o)
            for i, (o, dtype) in enumerate(zip(outputs, dtypes, strict=True))
            if o.requires_grad
        ]
        found = torch.autograd.grad(rooted, [x for _, x in leaves], grads, allow_unused=True)
        for i, ((name, x), grad) in enumerate(zip(leaves, found, strict=True)):
            key = f"grad {name}" if [n for n, _ in leaves].count(name) == 1 else f"grad {name}[{i}]"
            named[key] = torch.zeros_like(x) if grad is None else grad
    return {n: t.detach() for n, t in named.items()}


def with_leaves(
    arguments: Mapping[str, Any], differentiable: Collection[str]
) -> tuple[dict[str, Any], list[tuple[str, Tensor]]]:
    """The arguments with each floating tensor of the differentiable ones as a new leaf; and those leaves, by name."""
    leaves: list[tuple[str, Tensor]] = []

    def leaf(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
            return x
        # Keep the strides of the case.
        leaves.append((name, x.detach().requires_grad_()))
        return leaves[-1][1]

    call = {n: tree_map(partial(leaf, n), v) if n in differentiable else v for n, v in arguments.items()}
    return call, leaves


def _compare(
    name: str, got: Tensor, eager: Tensor, fp64: Tensor, size: Callable[[Tensor], float], rounding: float, factor: float
) -> Comparison:
    """The `size` of the errors, and the bound: `factor` times eager's plus `rounding`."""
    if fp64.numel() == 0:
        return Comparison(name, 0.0, 0.0, 0.0)
    error, eager_error = (size(_difference(x, fp64)) for x in (got, eager))
    return Comparison(name, error if error == error else float("inf"), eager_error, factor * eager_error + rounding)


def rms(x: Tensor) -> float:
    return (x.norm() / max(x.numel(), 1) ** 0.5).item()


def _largest_element(x: Tensor) -> float:
    return x.abs().max().item()


def _incoming(output: Tensor, seed: int) -> Tensor:
    """A random gradient, the same for every dtype; a large one is drawn on its device."""
    home = output.device if output.numel() > _LARGE else torch.device("cpu")
    generator = torch.Generator(home).manual_seed(seed)
    return torch.randn(output.shape, generator=generator, device=home).to(output.device)


def double(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with floating-point tensors in float64."""

    def one(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.dtype.is_floating_point else x

    return {name: tree_map(one, value) for name, value in arguments.items()}


def _mismatch(got: Tensor | None, expected: Tensor) -> str | None:
    if got is None:
        return "missing"
    if got.shape != expected.shape:
        return f"shape {tuple(got.shape)}, the reference gives {tuple(expected.shape)}"
    if got.dtype != expected.dtype:
        return f"dtype {got.dtype}, the reference gives {expected.dtype}"
    return None


def _largest(tensors: Iterable[Tensor]) -> float:
    known = (t.abs().nan_to_num_(nan=0.0, posinf=0.0) for t in tensors if t.numel())
    return max((t.max().item() for t in known), default=0.0)


def _difference(x: Tensor, fp64: Tensor) -> Tensor:
    """x - fp64 in float64; 0 where both are NaN, as the mean over no labels is, or infinite, as hidden scores are."""
    difference = x.double() - fp64
    if fp64.isfinite().all():
        return difference
    return difference.masked_fill_((x.isnan() & fp64.isnan()) | ((x == fp64) & fp64.isinf()), 0.0)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaN (the largest integer for integer dtypes) inside the block."""
    # A property of the module's class, which type checkers don't see.
    deterministic: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            # torch fills memory only in deterministic mode, in which it warns about other operations.
            warnings.filterwarnings("ignore", ".*(non-deterministic algorithm|not have a deterministic implementation)")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=warn_only)
        deterministic.fill_uninitialized_memory = before[1]
