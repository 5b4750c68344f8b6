"""`OpSpec` and `OpVariant`: an op's contract, and the inputs and costs that its kernels are checked and timed with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opslot._base.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from opslot.slots.spec import KernelRequest


@dataclass(frozen=True)
class Cost:
    """The least a kernel must do, forward plus backward: each input read once, each output written once.

    Attributes:
        bytes: bytes moved through device memory.
        flops: floating-point operations of its matmuls (2 per multiply-add).
    """

    bytes: int
    flops: int = 0


@dataclass(frozen=True)
class InputCase:
    """One input of an op.

    Attributes:
        name: short and unique within the variant, e.g. "odd rows, strided".
        make: `(dtype, device, generator) -> arguments by name`; floating tensors in `dtype` unless the contract has
            others, random, never all zero.
        role: "check" for `opslot verify` and tests, "bench" for shapes worth timing (large; GPU).
        shape: what `OpVariant.static_shape` returns for a call site of these sizes; None where no call site has them.
    """

    name: str
    make: Callable[[torch.dtype, torch.device, torch.Generator], dict[str, Any]]
    role: str = "check"
    shape: Mapping[str, int] | None = None


@dataclass(frozen=True)
class OpVariant:
    """One meaning of an op. A kernel is bound to exactly one.

    Attributes:
        name: e.g. "weight_offset".
        reference: plain torch code whose signature is the contract; it computes in the dtype it is given, so
            float64 inputs give the reference that kernels are compared with.
        cases: input cases for checks and benchmarks.
        differentiable: names of the arguments that receive gradients.
        cost: `arguments -> Cost`, for the roofline in a benchmark.
        check_module: given the module that holds a slot, why this variant's kernels would be wrong there, or None.
        config_field: configuration field that chooses this variant, when it is not the op's.
        tolerance_ulps: by dtype name ("float32"), how many ULPs of the largest value a kernel may err beyond twice
            eager's error, where one is not enough; the op's file has the reason.
        static_shape: given a call site's request, the static sizes that decide which kernel is fastest there (widths,
            heads, experts; not the number of tokens), or None if they are unknown; the profile is keyed by them.
        benchmark_case: `(shape, tokens) -> InputCase`, a case worth timing with those sizes and that many tokens.
        compiles: whether torch.compile of `reference` is worth timing: not where it loops over chunks, experts or
            documents, where the compiler stops or unrolls for minutes.
        extends: the variant that also computes a part of this one, in separate slots. Where the named kernel has no
            form of this variant, or is not usable, those slots are bound as without it, and nothing raises.
        description: one line.
    """

    name: str
    reference: Callable[..., Any]
    cases: Sequence[InputCase]
    differentiable: tuple[str, ...]
    cost: Callable[[Mapping[str, Any]], Cost] | None = None
    check_module: Callable[[Any], str | None] | None = None
    config_field: str | None = None
    tolerance_ulps: Mapping[str, float] = field(default_factory=dict)
    static_shape: Callable[[KernelRequest], Mapping[str, int] | None] | None = None
    benchmark_case: Callable[[Mapping[str, int], int], InputCase] | None = None
    compiles: bool = True
    extends: str | None = None
    description: str = ""

    def case(self, name: str) -> InputCase:
        """The case of that name."""
        return next(case for case in self.cases if case.name == name)

    def signature_problem(self, kernel: Callable[..., Any]) -> str | None:
        """How the kernel's parameters differ from the contract's (names, order, kinds, defaults), or None."""
        wanted = _parameters(self.reference)
        try:
            found = _parameters(kernel)
        except (TypeError, ValueError):
            return "its signature cannot be read"
        if wanted == found:
            return None
        return f"takes {_show(kernel)}, the contract is {_show(self.reference)}"


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def _show(function: Callable[..., Any]) -> str:
    parameters = inspect.signature(function).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(bare))


@dataclass(frozen=True)
class OpSpec:
    """An op: a name users know, and its variants.

    Attributes:
        name: e.g. "rms_norm".
        variants: by name.
        config_field: field of `OpsImplementationConfig`; `<name>_implementation` unless given.
        aliases: other names of that field.
        attach: for an op selected per model rather than per slot (attention) or that must prepare the model (experts):
            `(model, slot bindings, kernel or None) -> state`, called when a model is bound, with all slots of the op,
            or for an op selected per model with that of the model, and its kernel; `state` is what
            `detach(model, state)` needs to undo it.
        runs: `(module) -> name`: which of Transformers' own implementations would run in that module, where it has
            several.
        applies_to: the variant of such a per-model op in a module that is a model, or None where it has none; each
            config is queried once.
        per_module: `applies_to` is instead called for every module, with the config of the sub-model around it (None
            without one) as second argument. Of variants without a kernel that has a priority, only the modules that
            the configuration names one for are bound; the others are left alone and not listed.
        part: `(module) -> bool`: of a per-model op, whether its kernel runs in that module of the model.
        keeps: `(model, state or None, wanted) -> why`, of a per-model op: why the model keeps Transformers'
            implementation though the configuration has "auto" or a kernel, or None.
        can_serve: `(bound kernel, *modules) -> bool`: whether the kernel may run in place of a call of the modules
            that generated code gives to `BoundKernel.can_serve`.
        is_called: `(arguments of a call of the model) -> bool`: whether the kernel is called then; None in every call.
        note: `(model) -> line`: what `explain` adds to its table on the op, "" for nothing.
        bound_to_model: False for an op that the trainer chooses for itself and no model is bound to (the optimizer).
    """

    name: str
    variants: Mapping[str, OpVariant]
    config_field: str = ""
    aliases: tuple[str, ...] = ()
    attach: Callable[[Any, Sequence[Any], Callable[..., Any] | None], Any] | None = None
    detach: Callable[[Any, Any], None] | None = None
    runs: Callable[[Any], str | None] | None = None
    applies_to: Callable[..., str | None] | None = None
    per_module: bool = False
    part: Callable[[Any], bool] | None = None
    keeps: Callable[[Any, Any, str], str | None] | None = None
    can_serve: Callable[..., bool] | None = None
    is_called: Callable[[Mapping[str, Any]], bool] | None = None
    note: Callable[[Any], str] | None = None
    bound_to_model: bool = True
    description: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.variants, Mapping):
            raise ConfigError(
                f"OpSpec {self.name!r}: variants must be a mapping by name",
                found=type(self.variants).__name__,
                hint='e.g. {"standard": OpVariant("standard", reference, cases, gradients)}',
            )
        if not self.config_field:
            object.__setattr__(self, "config_field", f"{self.name}_implementation")

    def variant(self, name: str) -> OpVariant:
        """Variant `name`; ConfigError naming those that exist."""
        if name not in self.variants:
            raise ConfigError(
                f"op {self.name!r} has no variant {name!r}", hint=f"use one of {', '.join(self.variants)}"
            )
        return self.variants[name]

    def field_of(self, variant: str) -> str:
        """Configuration field that chooses `variant`."""
        return self.variant(variant).config_field or self.config_field
