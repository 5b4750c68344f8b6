"""`OpsImplementationConfig`: the implementation of each op."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from opslot._base.errors import ConfigError, count_of, list_problems
from opslot.slots.registry import KERNEL_REGISTRY, usable_values

if TYPE_CHECKING:
    from opslot.slots.op import OpSpec

# The GPU defaults of the specification that opslot implements (VeOmni's).
PRESETS: dict[str, dict[str, str]] = {
    "auto": {},
    "veomni": {
        "attn_implementation": "flash_attention_2",
        "cross_entropy_loss_implementation": "liger_kernel",
        "rms_norm_implementation": "liger_kernel",
        "swiglu_mlp_implementation": "liger_kernel",
        "rotary_pos_emb_implementation": "liger_kernel",
        "load_balancing_loss_implementation": "triton",
        "moe_implementation": "fused_triton",
    },
    "eager": {},
    # Linear layers in FP8; output heads, routers, experts and all else in the model's dtype.
    "fp8": {"linear_implementation": "fp8"},
    # A token's result does not depend, bit for bit, on what else is in the batch. Ops that are not listed compute each
    # token, or each element, on its own with every kernel.
    "batch_invariant": {
        "attn_implementation": "batch_invariant",
        "cross_entropy_loss_implementation": "batch_invariant",
        "linear_implementation": "batch_invariant",
        "linear_head_implementation": "batch_invariant",
        "moe_implementation": "fused_triton",
        "rms_norm_implementation": "batch_invariant",
        "rms_norm_gated_implementation": "batch_invariant",
    },
}


def config_fields() -> dict[str, list[tuple[str, str]]]:
    """Every configuration field with the (op, variant) pairs it selects for; derived from the registered ops."""
    fields: dict[str, list[tuple[str, str]]] = {}
    for op in KERNEL_REGISTRY.ops.values():
        fields.setdefault(op.config_field, [])
        for variant in op.variants:
            fields.setdefault(op.field_of(variant), []).append((op.name, variant))
    return fields


class OpsImplementationConfig:
    """One implementation name per op; every field defaults to "auto".

    Fields are those of the registered ops (`<op>_implementation`; `attn_implementation` for attention,
    `moe_implementation` for experts, or `moe_experts_implementation`). Values: "auto", "eager" or the name of
    a kernel.

    Args:
        preset: "auto" for "auto" in every field, "veomni" for that system's GPU defaults, "eager" for Transformers'
            own code everywhere, as the model would run it (attention and experts keep the implementation that
            Transformers selected, while the field `attn_implementation: eager` selects the one of that name),
            "batch_invariant" for results of a token that do not depend on what else is in the batch, "fp8" for linear
            layers in FP8; single fields override it.
        overrides: by module-path glob, fields that hold there only, e.g.
            `{"model.layers.0.*": {"rms_norm_implementation": "eager"}}`.
        **fields: implementation by field.

    A config is immutable: what was validated is what is bound.

    Raises:
        ConfigError: lists every unknown field, unknown value, missing package and unfit hardware at once, each with
            the usable alternatives and why the others are not.
    """

    preset: str
    overrides: Mapping[str, Mapping[str, str]]
    _values: dict[str, str]
    _aliases_given: dict[str, str]
    # Those that single fields gave.
    _named: dict[str, str]

    def __init__(
        self,
        preset: str = "auto",
        overrides: Mapping[str, Mapping[str, str]] | None = None,
        **fields: str,
    ) -> None:
        known = config_fields()
        problems: list[str] = []
        values = dict.fromkeys(known, "auto")
        if isinstance(preset, str) and preset in PRESETS:
            values.update(dict.fromkeys(known, "eager") if preset == "eager" else PRESETS[preset])
        else:
            problems.append(f"preset={preset!r} is unknown; use one of {', '.join(PRESETS)}")
        named = _canonical(fields, known, problems)
        values.update(named)
        if not _maps_to_mappings(overrides):
            problems.append(
                f"overrides={overrides!r} must map globs of module paths to the fields that hold there; "
                'e.g. {"model.layers.0.*": {"rms_norm_implementation": "eager"}}'
            )
            overrides = None
        by_glob = {
            glob: _canonical(chosen, known, problems, where=f"overrides[{glob!r}].")
            for glob, chosen in (overrides or {}).items()
        }
        read_only = {glob: MappingProxyType(chosen) for glob, chosen in by_glob.items()}
        aliases = _aliases()
        names = [name for given in (fields, *(overrides or {}).values()) for name in given if name in aliases]
        self.__dict__.update(
            preset=preset,
            overrides=MappingProxyType(read_only),
            _values=values,
            _aliases_given={aliases[name]: name for name in names},
            _named=named,
        )
        for where, chosen in [("", values), *((f"overrides[{glob!r}].", chosen) for glob, chosen in by_glob.items())]:
            for field, value in chosen.items():
                problem = _value_problem(self.name_of(field), value, known[field])
                if problem:
                    problems.append(where + problem)
        if problems:
            raise ConfigError(list_problems(f"ops_implementation has {count_of(problems)}", problems, shown=30))

    @classmethod
    def make(cls, value: OpsImplementationConfig | Mapping[str, Any] | str | None) -> OpsImplementationConfig:
        """Read what users write: a config, a mapping of fields, "auto", a preset's name, or None (= "auto")."""
        if isinstance(value, cls):
            return value
        if value is None:
            return cls()
        if isinstance(value, str):
            return cls(preset=value)
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            return cls(**value)
        raise ConfigError(
            "ops must be an OpsImplementationConfig, a mapping by field names, 'auto' or a preset's name",
            found=type(value).__name__,
            hint='e.g. {"rms_norm_implementation": "eager"}',
        )

    def __getattr__(self, name: str) -> str:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        aliases = _aliases()
        if name in aliases:
            return values[aliases[name]]
        raise AttributeError(f"{type(self).__name__} has no field {name!r}; it has {', '.join(values)}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(
            f"{name}={value!r} can't be set on an {type(self).__name__}, which is immutable",
            hint=f"make another, OpsImplementationConfig(**{{**config.to_dict(), {name!r}: {value!r}}})",
        )

    def choice(self, op_name: str, variant: str, path: str = "", parts: Sequence[str] = ()) -> str:
        """Implementation wanted for an op at module `path`; the last override that matches it, or all `parts`, wins."""
        field = KERNEL_REGISTRY.op(op_name).field_of(variant)
        return next((chosen[field] for chosen in self._overrides_at(field, path, parts)), self._values[field])

    def is_from_preset(self, op_name: str, variant: str, path: str = "", parts: Sequence[str] = ()) -> bool:
        """Whether `choice` is that of the preset "eager", and not of a field."""
        field = KERNEL_REGISTRY.op(op_name).field_of(variant)
        return (
            self.preset == "eager"
            and field not in self._named
            and not any(True for _ in self._overrides_at(field, path, parts))
        )

    def _overrides_at(self, field: str, path: str, parts: Sequence[str]) -> Iterator[Mapping[str, str]]:
        """Overrides that give `field` at module `path`, or at all `parts`; the one that wins first."""
        for glob in reversed(list(self.overrides)):
            chosen = self.overrides[glob]
            everywhere = parts and len(fnmatch.filter(parts, glob)) == len(parts)
            if field in chosen and (fnmatch.fnmatchcase(path, glob) or everywhere):
                yield chosen

    def names_kernel(self, op: OpSpec) -> bool:
        """Whether a kernel of the op is named, for the whole model or by an override."""
        fields = {op.field_of(variant) for variant in op.variants}
        everywhere = (self._values, *self.overrides.values())
        return any(chosen.get(field, "auto") not in ("auto", "eager") for chosen in everywhere for field in fields)

    def named_fields(self) -> Iterator[tuple[str, str]]:
        """Fields with a value other than "auto"."""
        return ((field, value) for field, value in self._values.items() if value != "auto")

    def named_kernels(self) -> list[str]:
        """Fields and overrides that name a kernel, as `field=kernel`."""
        everywhere = (self._values, *self.overrides.values())
        fields = ((name, value) for chosen in everywhere for name, value in chosen.items())
        named = (f"{self.name_of(name)}={value}" for name, value in fields if value not in ("auto", "eager"))
        return list(dict.fromkeys(named))

    def name_of(self, field: str) -> str:
        """The name under which the user set a field: an alias or its own."""
        return self._aliases_given.get(field, field)

    def to_dict(self) -> dict[str, Any]:
        """Plain data from which an equal config can be made."""
        # Fields that name "eager" would select more than the preset does.
        out: dict[str, Any] = {"preset": "eager", **self._named} if self.preset == "eager" else dict(self._values)
        if self.overrides:
            out["overrides"] = {glob: dict(chosen) for glob, chosen in self.overrides.items()}
        return out

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpsImplementationConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).make, (self.to_dict(),)

    def __repr__(self) -> str:
        of_preset = {"preset": "eager", **self._named}.items()
        shown = ", ".join(f"{k}={v!r}" for k, v in (of_preset if self.preset == "eager" else self.named_fields()))
        return f"OpsImplementationConfig({shown or 'all auto'})"


def _maps_to_mappings(overrides: Any) -> bool:
    if overrides is None:
        return True
    if not isinstance(overrides, Mapping) or not all(isinstance(fields, Mapping) for fields in overrides.values()):
        return False
    return all(isinstance(name, str) for name in [*overrides, *(n for fields in overrides.values() for n in fields)])


def _aliases() -> dict[str, str]:
    return {alias: op.config_field for op in KERNEL_REGISTRY.ops.values() for alias in op.aliases}


def _canonical(
    fields: Mapping[str, str], known: Mapping[str, Any], problems: list[str], where: str = ""
) -> dict[str, str]:
    """Resolve aliases; report unknown fields and a field given under two names."""
    aliases = _aliases()
    out: dict[str, str] = {}
    given: dict[str, str] = {}
    for name, value in fields.items():
        field = aliases.get(name, name)
        if field not in known:
            candidates = [*known, *aliases, *(() if where else ("preset", "overrides"))]
            near = [f"{name}_implementation"] if f"{name}_implementation" in candidates else []
            near = near or difflib.get_close_matches(name, candidates, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; fields are {', '.join(sorted(known))}"
            problems.append(f"{where}{name} is not a field{hint}")
        elif field in out:
            problems.append(f"{where}{name} and {where}{given[field]} are the same field; set one of them")
        else:
            out[field], given[field] = value, name
    return out


def _value_problem(field: str, value: Any, targets: list[tuple[str, str]]) -> str | None:
    """What is wrong with `field: value` on this machine, or None."""
    if not isinstance(value, str):
        return f"{field}={value!r} must be a string"
    if value in ("auto", "eager") or not targets:
        return None
    specs = [spec for target in targets for spec in KERNEL_REGISTRY.specs(*target)]
    reasons: dict[str, str | None] = {}
    for spec in specs:
        reason = spec.unsupported_here()
        if reasons.get(spec.name, reason) is not None or spec.name not in reasons:
            reasons[spec.name] = reason
    if value in reasons and reasons[value] is None:
        return None
    found = reasons.get(value)
    if found is None:
        near = similar_names(value, [*reasons, "auto", "eager"])
        found = "no such implementation" + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "")
    return f"{field}={value!r}: {found}\n{usable_values(reasons, value)}"


def similar_names(name: str, names: Sequence[str]) -> list[str]:
    """Kernels that an unknown `name` may mean: "fused" any fused_*, since the nearest may be for other hardware."""
    prefixed = [known for known in names if name and known.startswith(f"{name}_")]
    return prefixed or difflib.get_close_matches(name, names, 1)
