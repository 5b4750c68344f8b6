"""The checks of `check_architecture`, each on models of one config."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported, UserError

from opslot._base.errors import OpslotError
from opslot.checkpoint import save_weights
from opslot.data.multimodal.rope_positions import RopePositions
from opslot.models import apply, build_foundation_model
from opslot.models._multimodal.modalities import decoder_of
from opslot.models._multimodal.parts import parts_of
from opslot.models._registry import declared_sub_model
from opslot.slots import KERNEL_REGISTRY, BindingReport, OpsImplementationConfig, bind
from opslot.slots.protocol import is_own_attention, keeps_sequences
from opslot.verify.bisect import PLAIN, Float64Mode, Selections, bisect, in_fp64, loss_and_gradients
from opslot.verify.compiled import compiled_step, padded_batch, reason_of
from opslot.verify.isolated import Processes
from opslot.verify.media import MediaSamples, packed_samples, parallel_samples
from opslot.verify.parity import EAGER_FACTOR, double
from opslot.verify.random_model import (
    BATCH,
    LENGTH,
    SEED,
    packed_batches,
    random_ids,
    random_model,
    train_step,
    trained_part,
    whole_batch,
    worst_difference,
)
from opslot.verify.two_processes import SIZES, two_process_step

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CHECKS = ("eager", "auto", "packed", "compiled", "frozen", *SIZES, "checkpoint")
# Those on another device than the CPU, or in another dtype than float32.
ANYWHERE = ("auto", "packed", "compiled")
_GPU_LENGTH, _GPU_NOISE = 150, 0.03
# The ops that compute each document alone.
_BY_DOCUMENT = ("attention", "causal_conv1d", "chunk_gated_delta_rule", "mamba_chunk_scan")

Ops = OpsImplementationConfig | dict[str, Any] | str


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of one of `CHECKS`.

    Attributes:
        name: of the check.
        result: "passed", "failed", or "unsupported" where opslot does not support it for the model.
        detail: what was compared, what failed, or why it is not supported.
    """

    name: str
    result: str
    detail: str = ""


class _NoReference(Exception):
    """Transformers' own model raises, so that there is nothing to compare with."""


def _of_transformers(step: Callable[..., dict[str, Tensor]], *arguments: Any) -> dict[str, Tensor]:
    """The loss and gradients of Transformers' own model."""
    try:
        return step(*arguments)
    except Exception as error:
        raise _NoReference(f"Transformers raises {type(error).__name__}: {error}") from error


class ConfigChecks:
    """The checks of one config."""

    def __init__(
        self,
        config: PreTrainedConfig,
        ops: Ops,
        processes: Processes,
        media: MediaSamples | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config, self.ops, self.processes, self.media = config, ops, processes, media
        self.device, self.dtype = device, dtype
        self.ids = random_ids(config, LENGTH if device.type == "cpu" else _GPU_LENGTH)
        self._one_process: dict[tuple[int, ...], dict[str, Tensor]] = {}
        # The load-balancing loss and the z-loss are not sums over documents or ranks.
        self._separable, self._note = _without_means_over_calls(config)

    def outcome(self, check: str) -> CheckOutcome:
        function = getattr(self, f"_{check}", None)
        try:
            return CheckOutcome(check, *(function() if function is not None else self._parallel(check)))
        except _NoReference as error:
            return CheckOutcome(check, "unsupported", str(error))
        except Exception as error:
            if self._transformers_error:
                return CheckOutcome(check, "unsupported", self._transformers_error)
            detail = str(error) if isinstance(error, OpslotError) else f"raised {type(error).__name__}: {error}"
            return CheckOutcome(check, "failed", detail)

    @cached_property
    def _transformers_error(self) -> str:
        """What Transformers' own model raises for the samples; "" where it runs."""
        original = random_model(self.config)
        try:
            for batch in self._batches().values():
                _of_transformers(self._step, trained_part(original), batch)
        except _NoReference as error:
            return str(error)
        return ""

    def _eager(self) -> tuple[str, str]:
        original = random_model(self.config)
        model = copy.deepcopy(original)
        apply(model, "eager")
        for name, batch in self._batches().items():
            wanted = _of_transformers(self._step, trained_part(original), batch)
            differ = _differences(self._step(trained_part(model), batch), wanted)
            if differ:
                more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
                return "failed", f"{self._of(name)}differs from Transformers in {', '.join(differ[:3])}{more}"
        return "passed", "loss and gradients equal Transformers' bit for bit"

    def _auto(self) -> tuple[str, str]:
        model = self._random_model()
        more = _kernels_of_larger_sizes(apply(model, self.ops))
        if more:
            config = OpsImplementationConfig.make(self.ops)
            bind(model, {**config.to_dict(), "overrides": {**config.overrides, **more}})
        detail = "loss and gradients equal the fp64 reference"
        for name, given in self._batches().items():
            batch = self._on_device(given)
            if (worst := self._differs_in_its_dtype(model, batch)) is not None:
                if worst:
                    return "failed", f"{self._of(name)}{worst}"
                detail = "equals Transformers' code, which does not take float64"
                continue
            found = bisect(model, batch)
            if not found.ok:
                return "failed", f"{self._of(name)}{found}"
        return "passed", detail

    def _of(self, sample: str) -> str:
        return "" if self.media is None else f"{sample}: "

    def _batches(self) -> Mapping[str, dict[str, Any]]:
        """Arguments of a forward, by name."""
        return {"text": {"input_ids": self.ids, "labels": self.ids}} if self.media is None else self.media.batches

    def _random_model(self, config: PreTrainedConfig | None = None) -> Any:
        """Transformers' own model on the device and in the dtype of the checks."""
        given = {} if self.device.type == "cpu" else {"noise": _GPU_NOISE}
        return random_model(self.config if config is None else config, self.dtype, **given).to(self.device)

    def _on_device(self, batch: Mapping[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
        """The batch on the device, with floating-point inputs in `dtype`, by default that of the checks."""
        dtype = self.dtype if dtype is None else dtype
        return {
            name: x.to(self.device, dtype if x.is_floating_point() else None) if isinstance(x, Tensor) else x
            for name, x in batch.items()
        }

    def _differs_in_its_dtype(self, model: Any, batch: dict[str, Any]) -> str | None:
        """The largest difference from Transformers' code where that does not run in float64; None where it does."""
        original = self._random_model()
        # Without kernels of torch and other packages that Transformers selects.
        apply(original, PLAIN)
        try:
            with Float64Mode():
                self._step(trained_part(in_fp64(original)), double(batch))
        except RuntimeError as error:
            if not any(words in str(error) for words in ("dtype", "scalar type", "without overflow")):
                return None
            if self.dtype == torch.float32:
                return worst_difference(self._step(model, batch), self._step(original, batch))
            found, eager = self._step(model, batch), self._step(original, batch)
            return _further(found, eager, self._step(original.float(), self._on_device(batch, torch.float32)))
        return None

    def _packed(self) -> tuple[str, str]:
        model = self._model(config=self._separable)
        if reason := keeps_sequences(decoder_of(model) or model):
            return "unsupported", reason
        if self.media is None:
            given = [packed_batches(self.ids, rows) for rows in (1, BATCH)]
        else:
            part = trained_part(random_model(self.config))
            positions = RopePositions(part.config, type(part).__name__)
            given = [packed_samples(positions, self.media)]
        worst = next(filter(None, (self._packing_differs(model, packed, alone) for packed, alone in given)), "")
        return ("failed", worst) if worst else ("passed", f"equals the documents alone{self._note}")

    def _packing_differs(self, model: Any, packed: list[dict[str, Any]], alone: list[dict[str, Any]]) -> str:
        """What differs between packed documents and the documents alone; "" if nothing does."""
        together = [self._on_device(batch) for batch in packed]
        if self.dtype == torch.float32:
            return worst_difference(train_step(model, together), train_step(model, [self._on_device(b) for b in alone]))
        exact, eager = (self._model(PLAIN, self._separable) for _ in range(2))
        exact.float()
        apply(exact, PLAIN)
        # All with the experts of the run in float32, as in `bisect`.
        with Selections() as selections:
            wanted = train_step(exact, [self._on_device(batch, torch.float32) for batch in alone])
        of_documents, of_rows = _joined(selections.made, [batch["input_ids"].shape[1] for batch in alone])
        with Selections(of_documents):
            expected = train_step(eager, [self._on_device(batch) for batch in alone])
        with Selections(of_rows):
            found = train_step(model, together)
        further = _further(found, expected, wanted)
        if further and selections.made and not of_rows:
            # Selected keys are numbered within documents or rows, so that the runs select different ones in 16 bits.
            in_float32 = self._model(config=self._separable).float()
            apply(in_float32, self.ops)
            runs = [[self._on_device(batch, torch.float32) for batch in batches] for batches in (packed, alone)]
            return worst_difference(*(train_step(in_float32, batches) for batches in runs))
        return further

    def _compiled(self) -> tuple[str, str]:
        original = trained_part(self._random_model().eval())
        batches = {"padding": self._on_device(padded_batch(self.ids))}
        # A class outside Transformers has the reason against packed documents with its slots alone.
        model = self._model()
        try:
            train_step(trained_part(model), [batches["padding"]])
        except Exception:
            # Some models take no text without images.
            _of_transformers(train_step, original, [batches["padding"]])
            raise
        if self.media is None and not keeps_sequences(decoder_of(model) or model):
            batches["packed documents"] = self._on_device(packed_batches(self.ids)[0][0])
        ops, unsupported = self._ops_to_compile(), ""
        for name, batch in batches.items():
            try:
                worst = self._compiled_differs(ops, batch)
            except (Unsupported, UserError) as error:
                reason = reason_of(error, original, batch)
                if not reason:
                    return "failed", f"{name}: {error}"
                unsupported, worst = f"{name}: {reason}", ""
            if worst:
                return "failed", f"{name}: {worst}"
        if unsupported:
            return "unsupported", unsupported
        return "passed", f"one graph; equals the model uncompiled, with {' and '.join(batches)}"

    def _ops_to_compile(self) -> Ops:
        """Those that are checked; instead of `auto` on a CPU, the kernels that a GPU has where documents matter."""
        if self.ops != "auto" or self.device.type != "cpu":
            return self.ops
        named = {}
        for row in apply(random_model(self.config), self.ops):
            names = {spec.name: spec for spec in KERNEL_REGISTRY.specs(row.op, row.variant)}
            if row.op in _BY_DOCUMENT and "triton" in names and names["triton"].unsupported_here() is None:
                named[KERNEL_REGISTRY.op(row.op).field_of(row.variant)] = "triton"
        return named

    def _compiled_differs(self, ops: Ops, batch: dict[str, Any]) -> str:
        try:
            return self._differs_from_uncompiled(ops, batch)
        except OpslotError:
            # Unlike `auto`, a named kernel does not fall back.
            if ops is self.ops:
                raise
            return self._differs_from_uncompiled(self.ops, batch)

    def _differs_from_uncompiled(self, ops: Ops, batch: dict[str, Any]) -> str:
        model = self._model(ops)
        part = trained_part(model)
        wanted, found = train_step(part, [batch]), compiled_step(part, batch)
        if self.dtype == torch.float32:
            return worst_difference(found, wanted)
        model.float()
        # Named kernels need not take float32.
        apply(model, "auto")
        in_float32 = self._on_device(batch, torch.float32)
        with Selections() as selections:
            exact = train_step(part, [in_float32])
        further = _further(found, wanted, exact, "the model uncompiled")
        if further and selections.made:
            # In 16 bits rounding selects other experts or keys.
            apply(model, ops)
            return worst_difference(compiled_step(part, in_float32), train_step(part, [in_float32]))
        return further

    def _frozen(self) -> tuple[str, str]:
        model, original = self._model(), random_model(self.config).eval()
        # Transformers' other implementations ignore that some encoders are bidirectional (Phi-4 multimodal).
        _run_the_same_code(trained_part(original), trained_part(self._model(PLAIN)))
        # Without the language model, samples of text train nothing.
        batches = [batch for name, batch in self._batches().items() if self.media is None or name != "text"]
        parts = _frozen_parts(model, has_media=self.media is not None)
        for part, names in parts.items():
            for own in (model, original):
                for name, parameter in own.named_parameters():
                    parameter.requires_grad_(name not in names)
            wanted = _of_transformers(train_step, trained_part(original), batches)
            found = train_step(trained_part(model), batches)
            if worst := worst_difference(found, wanted):
                return "failed", f"{part} frozen: {worst}"
            trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
            if trained & names:
                return "failed", f"{part} frozen: {min(trained & names)} has a gradient"
        return "passed", f"frozen in turn: {', '.join(parts)}"

    def _parallel(self, check: str) -> tuple[str, str]:
        batches = [[whole_batch(self.ids)]] if self.media is None else parallel_samples(self.media, check)
        wanted = self._wanted([batch for own in batches for batch in own])
        found = two_process_step(check, self._separable, self.ops, self.processes, batches)
        if found.unsupported:
            return "unsupported", found.unsupported
        if found.values is None:
            return "failed", found.error
        values = {name: torch.as_tensor(value) for name, value in found.values.items()}
        worst = worst_difference(values, wanted)
        return ("failed", worst) if worst else ("passed", f"two processes equal one{self._note}")

    def _wanted(self, batches: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Loss and gradients of one process."""
        key = tuple(batch["input_ids"].shape[1] for batch in batches)
        if key not in self._one_process:
            self._one_process[key] = train_step(self._model(config=self._separable), batches)
        return self._one_process[key]

    def _checkpoint(self) -> tuple[str, str]:
        original = random_model(self.config)
        wanted = original.state_dict()
        with tempfile.TemporaryDirectory() as folder:
            for name, there in self._round_trips(original, Path(folder)):
                if differ := _differences(there.state_dict(), wanted):
                    return "failed", f"{name}: {', '.join(differ[:3])} differ"
        return "passed", "Transformers reads what opslot saves, and the reverse"

    def _round_trips(self, original: Any, folder: Path) -> Iterator[tuple[str, Any]]:
        save_weights(self._model(), folder / "opslot")
        declared = declared_sub_model(original.config.model_type, type(original).__name__)
        for name in declared.files if declared is not None else ():
            # Transformers requires the files of the parts that are not built.
            torch.save({}, folder / "opslot" / name)
        yield "saved by opslot", type(original).from_pretrained(folder / "opslot", dtype=torch.float32)
        original.save_pretrained(folder / "transformers")
        built = build_foundation_model(
            self.config,
            folder / "transformers",
            "float32",
            ops_implementation="eager",
            architecture=type(original).__name__,
            trust_remote_code=not type(self.config).__module__.startswith("transformers."),
        )
        yield "saved by Transformers", built

    def _model(self, ops: Ops | None = None, config: PreTrainedConfig | None = None) -> Any:
        """The model bound to the kernels of `ops`, in evaluation mode: router jitter would make each run another."""
        model = self._random_model(config).eval()
        apply(model, self.ops if ops is None else ops)
        return model

    def _step(self, model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return loss_and_gradients(model, batch)


def _without_means_over_calls(config: PreTrainedConfig) -> tuple[PreTrainedConfig, str]:
    """A config whose model does not add a load-balancing loss or a z-loss (Bamba), and a note about those left out."""
    found = copy.deepcopy(config)
    parts = [found]
    for part in parts:
        parts.extend(p for name in part.sub_configs if (p := getattr(part, name, None)) is not None)
    left_out: dict[str, None] = {}
    for field, loss in (("output_router_logits", "load-balancing loss"), ("z_loss_coefficient", "z-loss")):
        for part in parts:
            if value := getattr(part, field, None):
                setattr(part, field, type(value)())
                left_out[loss] = None
    return found, f", without the {' and the '.join(left_out)}" if left_out else ""


def _joined(selected: list[Tensor], lengths: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """What documents of `lengths` selected for their tokens, one after the other, and the same for all of them in one
    row; nothing where other things were selected.
    """
    layers = len(selected) // len(lengths)
    if [len(x) for x in selected] != [length for length in lengths for _ in range(layers)]:
        return [], []
    return selected, [torch.cat(selected[layer::layers]) for layer in range(layers)]


def _further(
    found: Mapping[str, Tensor],
    other: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    of_other: str = "Transformers' code",
) -> str:
    """How much further from `exact` the loss and all gradients together are than `EAGER_FACTOR` times those of another
    run; "" if they are not.
    """
    gradients = [name for name in exact if name != "loss"]
    eps = torch.finfo(other[gradients[0]].dtype).eps
    for what, names in (("the loss", ["loss"]), ("the gradients", gradients)):
        size = _norm(exact[name] for name in names)
        errors = [_norm(x[name].double() - exact[name].double() for name in names) for x in (found, other)]
        # `<=` is not true of nan.
        if not errors[0] <= EAGER_FACTOR * errors[1] + eps * size:
            return f"error of {what} {errors[0]:.1e} of {size:.1e}, that of {of_other} {errors[1]:.1e}"
    return ""


def _norm(tensors: Iterable[Tensor]) -> float:
    return sum(float(x.double().square().sum()) for x in tensors) ** 0.5


def _kernels_of_larger_sizes(report: BindingReport) -> dict[str, dict[str, str]]:
    """By module, kernels that `auto` does not select only because they are not faster at the sizes of a tiny model."""
    usable: dict[tuple[str, str], list[list[str]]] = {}
    for row in report:
        names = [name for name, reason in row.rejected if reason.startswith("usable, but not measured faster")]
        # First those that `auto` selects elsewhere.
        unmeasured = {spec.name for spec in KERNEL_REGISTRY.specs(row.op, row.variant) if spec.priority is None}
        names.sort(key=unmeasured.__contains__)
        field = KERNEL_REGISTRY.op(row.op).field_of(row.variant)
        for path in row.modules or ("",):
            usable.setdefault((path, field), []).append(names if row.chosen == "eager" else [])
    found: dict[str, dict[str, str]] = {}
    for (path, field), of_variants in usable.items():
        # A module may call several variants of an op.
        kernel = next((name for name in of_variants[0] if all(name in names for names in of_variants)), None)
        if kernel is not None:
            found.setdefault(path, {})[field] = kernel
    return found


def _frozen_parts(model: Any, has_media: bool) -> dict[str, set[str]]:
    """Names of the parameters of each part: encoders, merger and language model, or the embeddings and the others."""
    if has_media:
        return {name: {*parameters} for name, parameters in parts_of(model).items() if parameters}
    embeddings = {id(e.weight) for e in (model.get_input_embeddings(), model.get_output_embeddings()) if e is not None}
    own = {name for name, parameter in model.named_parameters() if id(parameter) in embeddings}
    every = {name for name, _ in model.named_parameters()}
    return {"embeddings": own, "all but embeddings": every - own}


def _run_the_same_code(original: Any, model: Any) -> None:
    """Give the original model, and each model in it, the implementations that `model` runs, bound to `PLAIN`."""
    for theirs, ours in zip(original.modules(), model.modules(), strict=True):
        # Encoders and decoders of one model may have copies of its config (T5).
        if hasattr(theirs.__dict__.get("config"), "sub_configs"):
            for pair in _configs(theirs.config, ours.config):
                _copy_implementations(*pair)


def _copy_implementations(original: Any, config: Any) -> None:
    for attribute in ("_attn_implementation", "_experts_implementation"):
        wanted = getattr(config, attribute, None)
        if wanted is not None and not is_own_attention(wanted):
            # The property would set it on the configs in it too.
            setattr(original, f"{attribute}_internal", wanted)


def _configs(original: Any, config: Any) -> Iterator[tuple[Any, Any]]:
    """Two configs, and those in them, which may be the same."""
    yield original, config
    for name in config.sub_configs:
        theirs, ours = (getattr(c, name, None) for c in (original, config))
        if theirs is not None and ours is not None:
            yield from _configs(theirs, ours)


def _differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[str, ...]:
    names = [*wanted, *(name for name in found if name not in wanted)]
    return tuple(n for n in names if n not in found or n not in wanted or not _same(found[n], wanted[n]))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))
