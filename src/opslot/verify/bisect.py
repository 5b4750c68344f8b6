"""`bisect`: the slot and the layer of a model that make its loss or gradients wrong.

The model runs with Transformers' code everywhere, in its own dtype and in float64. The error of the bound kernels may
be twice that of Transformers' code plus the rounding error that the kernels' ops allow. Where it is more, each op
alone, then each layer alone, then each slot alone is bound to its kernel, until the smallest wrong part is found.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opslot._base.dtypes import dtype_name
from opslot._base.errors import ConfigError, KernelError
from opslot.ops.attention.bits import select
from opslot.ops.attention.reference import pack_bits
from opslot.slots import KERNEL_REGISTRY, BindingReport, OpsImplementationConfig, bind, bound_config, explain
from opslot.slots.bind import require_module
from opslot.verify.parity import DRAWS, EAGER_FACTOR, Comparison, double, mean_of, nearest, rms

Way = Callable[["Suspect"], Iterable["Suspect"]]

# Transformers' plain code, also of attention and experts: `sdpa` and `grouped_mm` are kernels of torch.
PLAIN = {"preset": "eager", "attn_implementation": "eager", "moe_implementation": "eager"}
# An error this many times its bound is not luck: of a tensor, and of one with few elements, in which eager's error may
# be small by luck.
_NO_LUCK, _NO_LUCK_OF_FEW, _FEW = 3.0, 30.0, 8
_SIXTEEN_BITS = 16
_NO_KERNEL = ("eager", "absent", "replaced")
_LAYER = re.compile(r"^(.*?\.\d+)(?:\.|$)")


@dataclass(frozen=True)
class Suspect:
    """One kernel in some modules, with Transformers' code in all others.

    Attributes:
        field: of `OpsImplementationConfig`.
        kernel: its value.
        paths: modules whose slots are bound to it; "" is the model itself.
        worst: the loss or gradient furthest beyond its bound.
        problem: why it did not run.
    """

    field: str
    kernel: str
    paths: tuple[str, ...]
    worst: Comparison | None = None
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem and self.worst is not None and self.worst.ok

    def __str__(self) -> str:
        where = self.paths[0] or "model"
        where += f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"{self.field}={self.kernel} at {where}: {self.problem or self.worst or ''}"


@dataclass(frozen=True)
class Bisection:
    """Result of `bisect`.

    Attributes:
        whole: the worst comparison with all kernels bound.
        culprits: the smallest parts that break parity alone; empty where parity holds or breaks only together.
    """

    whole: Comparison
    culprits: tuple[Suspect, ...] = ()

    @property
    def ok(self) -> bool:
        return self.whole.ok and not self.culprits

    def __str__(self) -> str:
        if self.ok:
            return f"no slot breaks parity; nearest to its bound is {self.whole}"
        if not self.culprits:
            return f"parity breaks, but no kernel breaks it alone: {self.whole}"
        return "\n".join(["parity breaks at", *(f"  {culprit}" for culprit in self.culprits)])


def bisect(
    model: Any, batch: Mapping[str, Any], ops: OpsImplementationConfig | Mapping[str, Any] | str | None = None
) -> Bisection:
    """Find the slots of `model` whose kernels break parity with Transformers' code on `batch`.

    Everything runs on copies of the model in evaluation mode, one of them in float64.

    In 16 bits, a rounding may route a token to another expert, whose gradients are then others'. There, all runs select
    the experts and the keys of sparse attention that the float64 run selects by `topk`.

    Args:
        model: one with slots (generated, or after `opslot.apply`), on the device where it will run.
        batch: arguments of its forward, including labels, so that it returns a loss.
        ops: the kernels to check; default those bound now, or "auto" where none are.

    Raises:
        ConfigError: `model` is not a module or returns no loss on `batch`, or `ops` cannot be bound.
    """
    require_module(model, "opslot.bisect")
    bound = copy.deepcopy(model).eval()
    keep = ops is None and bound_config(bound) is not None
    report = explain(bound) if keep else bind(bound, dict(ops) if isinstance(ops, Mapping) else ops)
    config = bound_config(bound)
    trial = _Trial(bound, batch)
    whole = trial.worst(config)
    if whole.ok:
        return Bisection(whole)
    return Bisection(whole, tuple(s for f in _by_field(report) for s in trial.narrow(f, (_by_layer, _by_slot))))


class _Trial:
    """Compares kernels with Transformers' code on one model and batch.

    As in `parity`, where an error exceeds its bound, means over `DRAWS` slightly different weights are compared.
    """

    def __init__(self, model: Any, batch: Mapping[str, Any]) -> None:
        self.model, self.batch = model, batch
        bind(model, PLAIN)
        self.expected = _Expected.of(model, batch)

    def narrow(self, suspect: Suspect, ways: Sequence[Way]) -> list[Suspect]:
        """The smallest parts of `suspect` that are wrong alone; itself where none of them is."""
        suspect = self._check(suspect)
        if suspect.ok:
            return []
        parts = ways[0](suspect) if ways else ()
        return [culprit for part in parts for culprit in self.narrow(part, ways[1:])] or [suspect]

    def _check(self, suspect: Suspect) -> Suspect:
        overrides = {path: {suspect.field: suspect.kernel} for path in suspect.paths}
        try:
            return replace(suspect, worst=self.worst(OpsImplementationConfig.make({**PLAIN, "overrides": overrides})))
        except KernelError as error:
            return replace(suspect, problem=str(error))

    def worst(self, ops: OpsImplementationConfig | None) -> Comparison:
        """The comparison nearest to its bound, or furthest beyond it, with the model bound to `ops`."""
        ulps = _tolerance_ulps(bind(self.model, ops))
        comparisons = self.expected.compare(self.model, self.batch, ulps)
        worst = nearest(comparisons)
        limit = _NO_LUCK_OF_FEW if self.expected.fp64[worst.name].numel() < _FEW else _NO_LUCK
        if worst.ok or worst.error > limit * worst.bound:
            return worst
        return nearest(mean_of([comparisons, *(self._draw(number, ops) for number in range(1, DRAWS))]))

    def _draw(self, number: int, ops: OpsImplementationConfig | None) -> tuple[Comparison, ...]:
        """Comparisons with all weights changed by about one percent, each time differently."""
        model = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for p in model.parameters():
                if p.dtype.is_floating_point:
                    p.mul_(1 + 0.01 * torch.randn(p.shape, generator=generator).to(p))
        bind(model, PLAIN)
        expected = _Expected.of(model, self.batch)
        return expected.compare(model, self.batch, _tolerance_ulps(bind(model, ops)))


@dataclass(frozen=True)
class _Expected:
    """Loss and gradients of Transformers' code, in the model's dtype and in float64; the rounding allowed for each.

    Attributes:
        selected: what the float64 run selected, for a model in 16 bits.
    """

    eager: Mapping[str, Tensor]
    fp64: Mapping[str, Tensor]
    rounding: Mapping[str, float]
    selected: Sequence[Tensor]

    @classmethod
    def of(cls, model: Any, batch: Mapping[str, Any]) -> _Expected:
        """Of a model that is bound to `PLAIN`."""
        dtype = torch.finfo(next(p.dtype for p in model.parameters() if p.dtype.is_floating_point))
        eps, selections = dtype.eps, Selections()
        with Float64Mode(), selections:
            fp64 = loss_and_gradients(in_fp64(model), double(batch))
        selected = selections.made if dtype.bits == _SIXTEEN_BITS else []
        with Selections(selected):
            eager = loss_and_gradients(model, batch)
        grads = [name for name in fp64 if name != "loss"]
        # A gradient that cancels to nearly nothing is still a sum of terms of the others' size, as in `parity`.
        rounding = dict.fromkeys(grads, eps * max((rms(fp64[n]) for n in grads), default=0.0))
        # A loss is one number, whose error in eager may be small by luck: it may be as far off as gradients are.
        missed = sum((eager[n].double() - fp64[n]).square().sum().item() for n in grads)
        relative = (missed / (sum(fp64[n].square().sum().item() for n in grads) or 1.0)) ** 0.5
        rounding["loss"] = max(eps, relative) * rms(fp64["loss"])
        return cls(eager, fp64, rounding, selected)

    def compare(self, model: Any, batch: Mapping[str, Any], ulps: Mapping[str, float]) -> tuple[Comparison, ...]:
        """Comparisons of the loss and gradients of a model bound to other kernels.

        Args:
            ulps: by dtype name, how many times the rounding a gradient may be off beyond twice eager's error.
        """
        with Selections(self.selected):
            found = loss_and_gradients(model, batch)
        return tuple(self._compare(name, x, ulps) for name, x in found.items())

    def _compare(self, name: str, found: Tensor, ulps: Mapping[str, float]) -> Comparison:
        error, eager_error = (rms(x.double() - self.fp64[name]) for x in (found, self.eager[name]))
        allowed = 1.0 if name == "loss" else ulps.get(dtype_name(found.dtype), 1.0)
        bound = EAGER_FACTOR * eager_error + allowed * self.rounding[name]
        return Comparison(name, error if error == error else float("inf"), eager_error, bound)


def loss_and_gradients(model: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    # In evaluation mode models make a cache by default, which some update in place (RWKV): no gradients.
    cached = "use_cache" in inspect.signature(model.forward).parameters
    loss = getattr(model(**{"use_cache": False, **batch} if cached else batch), "loss", None)
    if loss is None:
        raise ConfigError(f"bisect: {type(model).__name__} returns no loss on this batch", hint="add labels to it")
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    for module in model.modules():
        # RecurrentGemma keeps the last state, with its graph, which cannot be copied.
        vars(module).update({n: x.detach() for n, x in vars(module).items() if isinstance(x, Tensor) and x.grad_fn})
    return {"loss": loss.detach(), **{f"grad {name}": g for name, g in zip(named, grads, strict=True)}}


def _tolerance_ulps(report: BindingReport) -> Mapping[str, float]:
    """By dtype name, the largest `tolerance_ulps` of the bound kernels' variants."""
    largest: dict[str, float] = {}
    for row in report:
        if row.chosen not in _NO_KERNEL:
            for dtype, ulps in KERNEL_REGISTRY.op(row.op).variant(row.variant).tolerance_ulps.items():
                largest[dtype] = max(largest.get(dtype, 1.0), ulps)
    return largest


def _by_field(report: BindingReport) -> Iterator[Suspect]:
    paths: dict[tuple[str, str], list[str]] = {}
    for row in report:
        if row.chosen not in _NO_KERNEL:
            field = KERNEL_REGISTRY.op(row.op).field_of(row.variant)
            paths.setdefault((field, row.chosen), []).extend(row.modules or ("",))
    return (Suspect(field, kernel, tuple(where)) for (field, kernel), where in paths.items())


def _by_layer(suspect: Suspect) -> Iterable[Suspect]:
    """One layer at a time: a slot may need another one of its layer, as a residual sum needs its norm."""
    layers: dict[str, list[str]] = {}
    for path in suspect.paths:
        inside = _LAYER.match(path)
        layers.setdefault(inside.group(1) if inside else path, []).append(path)
    return [replace(suspect, paths=tuple(paths)) for paths in layers.values()]


def _by_slot(suspect: Suspect) -> Iterable[Suspect]:
    return [replace(suspect, paths=(path,)) for path in suspect.paths]


class Selections(TorchFunctionMode):
    """Makes each call of `topk` select given indices: those of the same call of another run. A selection of keys
    as bits, which replaces a `topk` of Transformers' sparse attention, also gets the given one.

    Args:
        given: by call; a call without any, or of another shape, selects by itself.

    Attributes:
        made: indices, or bits, of each call.
    """

    def __init__(self, given: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.given = given
        self.made: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk, select):
            return found
        number = len(self.made)
        self.made.append(found if function is select else found.indices)
        given = self.given[number] if number < len(self.given) else None
        if given is None:
            return found
        scores = args[0]
        if function is select:
            rows = scores.shape[:2].numel()
            return found if given.shape[:-1].numel() != rows else _bits_of(given.view(*scores.shape[:2], -1), scores)
        if given.shape != found.indices.shape:
            return found
        dim = args[2] if len(args) > 2 else (kwargs or {}).get("dim", -1)
        return torch.return_types.topk((scores.gather(dim, given), given))


def _bits_of(keys: Tensor, scores: Tensor) -> Tensor:
    """What `select` returns where it selects `keys` [B, S, top], without those whose score is -inf."""
    return pack_bits(torch.zeros_like(scores, dtype=torch.bool).scatter(-1, keys, True) & (scores > float("-inf")))


class Float64Mode(TorchFunctionMode):
    """Float64 wherever Transformers' code casts to float32, which would give a reference the errors of float32."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        args = [torch.float64 if x is torch.float32 else x for x in args]
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return function(*args, **kwargs)


def in_fp64(model: Any) -> Any:
    """A copy in float64, without Transformers' grouped GEMM of experts, which does not take float64."""
    copied = copy.deepcopy(model).double()
    if hasattr(copied, "set_experts_implementation"):
        copied.set_experts_implementation("eager")
    return copied
