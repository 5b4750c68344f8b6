"""Proof of a kernel: forward and every gradient against an fp64 truth, beside the same-dtype eager code.

A kernel passes where its largest error is at most twice the eager reference's plus one rounding. The rounding is that
of the largest output (or, for a gradient, of the largest gradient of the case): a gradient that cancels to nearly
nothing is still made of terms of that size, and another order of summation may leave one rounding of them.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from opslot._base.dtypes import dtype_name
from opslot._base.errors import KernelError
from opslot.slots import InputCase, OpVariant

EAGER_FACTOR = 2.0
_LARGE = 2**20


@dataclass(frozen=True)
class Comparison:
    """One tensor of one check ("out[1]", "grad weight"): the kernel's and eager's largest error, and the bound."""

    name: str
    error: float
    eager_error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True)
class CheckResult:
    """One kernel on one input case.

    Attributes:
        comparisons: one per output and gradient.
        problem: why there are none: the kernel raised, or shape or dtype differ from the reference's.
        refused: the kernel's own `KernelError`, if it does not serve the case; no failure, but no proof either.
    """

    op: str
    variant: str
    kernel: str
    case: str
    dtype: str
    comparisons: tuple[Comparison, ...] = ()
    problem: str = ""
    refused: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem and all(c.ok for c in self.comparisons)

    @property
    def worst(self) -> Comparison | None:
        """The comparison nearest to its bound, or furthest over it."""
        return max(self.comparisons, key=lambda c: c.error / c.bound if c.bound else float(c.error > 0), default=None)

    def __str__(self) -> str:
        head = f"{self.op}/{self.variant} {self.kernel} [{self.case}, {self.dtype}]"
        if self.problem or self.refused:
            return f"{head}: {self.problem or f'refused: {self.refused}'}"
        worst = self.worst
        if worst is None:
            return f"{head}: ok"
        verdict = "ok" if self.ok else "WRONG"
        figures = f"error {worst.error:.2e}, eager {worst.eager_error:.2e}, bound {worst.bound:.2e}"
        return f"{head}: {verdict}, {worst.name} {figures}"


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
) -> CheckResult:
    """Compare `kernel` with `variant.reference` on `case`; never raises for what the kernel does.

    Fresh memory is poisoned with NaN while the kernel runs, so that an element it does not write is seen.
    """
    device = torch.device(device)
    label = (op_name, variant.name, name, case.name, dtype_name(dtype))
    # Not hash(): it differs between processes, and a failure must be repeatable.
    generator = torch.Generator().manual_seed(seed + zlib.crc32("/".join(label).encode()))
    expected = expect(variant, case.make(dtype, device, generator), seed)
    return compare(kernel, expected, CheckResult(*label))


@dataclass(frozen=True)
class Expectation:
    """What the reference makes of one call's arguments.

    Attributes:
        arguments: the call's.
        eager, truth: outputs and gradients by name, computed in the arguments' dtypes and in float64.
    """

    variant: OpVariant
    arguments: dict[str, Any]
    seed: int
    eager: dict[str, Tensor]
    truth: dict[str, Tensor]


def expect(variant: OpVariant, arguments: dict[str, Any], seed: int = 0) -> Expectation:
    """Run the reference on `arguments`, twice: as they are and in float64."""
    eager = _run(variant, variant.reference, arguments, seed)
    truth = _run(variant, variant.reference, _cast(arguments, torch.float64), seed, eager)
    return Expectation(variant, arguments, seed, eager, truth)


def compare(
    kernel: Callable[..., Any], expected: Expectation, label: CheckResult, *, by_norm: bool = False
) -> CheckResult:
    """`label` with the comparisons of `kernel` on the same arguments; never raises for what the kernel does.

    Args:
        by_norm: compare root mean squares instead of largest elements, plus half a unit in the last place of the
            case's dtype. Among the 10^8 elements of a large case the largest error says little, and a loss is one
            number, on which eager's error may cancel by luck; `check_kernel` judges every element of small cases.
    """
    try:
        with poisoned_memory():
            got = _run(expected.variant, kernel, expected.arguments, expected.seed)
    except KernelError as error:
        return replace(label, refused=str(error))
    except Exception as error:
        return replace(label, problem=f"raised {type(error).__name__}: {error}")
    truth = expected.truth
    scales = {kind: _largest(t for key, t in truth.items() if key.startswith("grad") == kind) for kind in (True, False)}
    allowed = expected.variant.tolerance_ulps.get(label.dtype, 1.0)
    comparisons = []
    for key, wanted in expected.eager.items():
        mismatch = _mismatch(got.get(key), wanted)
        if mismatch:
            return replace(label, problem=f"{key}: {mismatch}")
        if by_norm:
            rounding = allowed * torch.finfo(getattr(torch, label.dtype)).eps / 2
            comparisons.append(_compare_norms(key, got[key], wanted, truth[key], rounding))
        else:
            comparisons.append(_compare(key, got[key], wanted, truth[key], allowed * scales[key.startswith("grad")]))
    return replace(label, comparisons=tuple(comparisons))


def _run(
    variant: OpVariant,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    seed: int,
    eager: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Outputs and gradients by name; the incoming gradients are the same random ones for every function.

    Args:
        eager: what the reference makes of the arguments as they are. The incoming gradients are rounded to its outputs'
            dtypes, or a rounding that is no kernel's doing would stand in every error.
    """
    wanted = [n for n in variant.differentiable if n in arguments]
    leaves: list[tuple[str, Tensor]] = []

    def leaf(name: str, value: Any) -> Any:
        if name not in wanted:
            return value

        def one(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
                return x
            # A view of the leaf with the case's own strides: kernels see what models give them.
            base = x.detach().requires_grad_()
            leaves.append((name, base))
            return base

        return tree_map(one, value)

    call = {n: leaf(n, v) for n, v in arguments.items()}
    outputs = [o for o in tree_flatten(function(**call))[0] if isinstance(o, Tensor)]
    named = {"out" if len(outputs) == 1 else f"out[{i}]": o for i, o in enumerate(outputs)}
    rooted = [o for o in outputs if o.requires_grad]
    if rooted:
        # By place among all outputs: a kernel may let gradients into one that the reference keeps them out of.
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


def _compare_norms(name: str, got: Tensor, eager: Tensor, truth: Tensor, rounding: float) -> Comparison:
    if truth.numel() == 0:
        return Comparison(name, 0.0, 0.0, 0.0)
    count = truth.numel() ** 0.5
    error, eager_error = ((_apart(x, truth).norm() / count).item() for x in (got, eager))
    known = truth.nan_to_num(0.0) if truth.isnan().any() else truth
    bound = EAGER_FACTOR * eager_error + rounding * (known.norm() / count).item()
    return Comparison(name, error if error == error else float("inf"), eager_error, bound)


def _incoming(output: Tensor, seed: int) -> Tensor:
    """A random gradient, the same for every dtype; a large one is drawn where it is used."""
    home = output.device if output.numel() > _LARGE else torch.device("cpu")
    generator = torch.Generator(home).manual_seed(seed)
    return torch.randn(output.shape, generator=generator, device=home).to(output.device)


def _cast(arguments: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    def one(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.dtype.is_floating_point else x

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
    known = (t.abs().nan_to_num_(nan=0.0, posinf=float("inf")) for t in tensors if t.numel())
    return max((t.max().item() for t in known), default=0.0)


def _apart(x: Tensor, truth: Tensor) -> Tensor:
    """x - truth in float64; 0 where both are NaN, as a mean over no labels is."""
    apart = x.double() - truth
    return apart.masked_fill_(x.isnan() & truth.isnan(), 0.0) if truth.isnan().any() else apart


def _compare(name: str, got: Tensor, eager: Tensor, truth: Tensor, scale: float) -> Comparison:
    if truth.numel() == 0:
        return Comparison(name, 0.0, 0.0, 0.0)
    error = _apart(got, truth).abs().max().item()
    eager_error = _apart(eager, truth).abs().max().item()
    rounding = torch.finfo(got.dtype).eps * scale if got.dtype.is_floating_point else 0.0
    if error != error:
        error = float("inf")
    return Comparison(name, error, eager_error, EAGER_FACTOR * eager_error + rounding)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaN (the largest integer for integer dtypes) inside the block."""
    # The module has this property by a class of its own, which no type checker sees.
    deterministic: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            # torch fills memory only where it is told to be deterministic, and then tells of each backend that is not.
            warnings.filterwarnings("ignore", ".*(non-deterministic algorithm|not have a deterministic implementation)")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=warn_only)
        deterministic.fill_uninitialized_memory = before[1]
