"""Bind a resumed run to the kernels that it was started with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opslot._base.errors import ConfigError, list_problems
from opslot.distributed import gather_objects
from opslot.slots import KERNEL_REGISTRY, OpsImplementationConfig, bind, bound_config, explain


def require_same_kernels(model: nn.Module) -> None:
    """Check that all ranks compute with the same kernels; other packages or profiles select others.

    Raises:
        ConfigError: on every rank; names the first modules and what each rank selected there.
    """
    by_rank = [_choices(record) for record in gather_objects(explain(model).to_dict())]
    keys = dict.fromkeys(key for choices in by_rank for key in choices)
    differing = [
        f"{path or 'model'}: {op} is "
        + ", ".join(f"{choices.get((op, variant, path), 'absent')} on rank {r}" for r, choices in enumerate(by_rank))
        for op, variant, path in keys
        if len({choices.get((op, variant, path)) for choices in by_rank}) > 1
    ]
    if differing:
        raise ConfigError(
            list_problems("the ranks selected different kernels", differing, shown=3),
            hint="give all machines the same packages and the same profile (OPSLOT_PROFILE), or name the kernels in "
            "model.ops_implementation",
        )


def pin_kernels(
    model: nn.Module,
    recorded: dict[str, Any],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> list[str]:
    """Bind `model` to the recorded kernels wherever its config is "auto".

    A field that names a kernel wins over the record.

    Args:
        dtype: what the model computes in, when that is not its parameters' dtype.
        device: where it will run, when it is on meta.

    Returns:
        One line for each kernel that differs from what the config alone would have given, or from the record.

    Raises:
        ConfigError: a recorded kernel can't be bound here, with the reason.
    """
    config = bound_config(model)
    if config is None:
        return []
    now = _choices(explain(model).to_dict())
    lines: list[str] = []
    fields = config.to_dict()
    overrides = fields.setdefault("overrides", {})
    pinned = False
    for key, chosen in _choices(recorded).items():
        op, variant, path = key
        if chosen == now.get(key, chosen):
            continue
        field = KERNEL_REGISTRY.op(op).field_of(variant)
        if config.choice(op, variant, path) != "auto":
            lines.append(f"{path or 'model'}: {op} was {chosen}, is {now[key]} because {field} names it")
            continue
        lines.append(f"{path or 'model'}: {op} stays {chosen} as recorded (auto would now select {now[key]})")
        pinned = True
        if path:
            overrides.setdefault(path, {})[field] = chosen
        else:
            fields[field] = chosen
    if pinned:
        try:
            bind(model, OpsImplementationConfig(**fields), device=device, dtype=dtype)
        except ConfigError as error:
            raise ConfigError(
                "the run cannot be resumed with the kernels it was started with",
                found=str(error),
                hint=(
                    "resume where they can run, or name others in model.ops_implementation (the "
                    "losses will then differ slightly)"
                ),
            ) from error
    return lines


def _choices(record: dict[str, Any]) -> dict[tuple[str, str, str], str]:
    """Kernel by (op, variant, module path); "" is the path of a choice for the whole model."""
    return {
        (row["op"], row["variant"], path): row["chosen"]
        for row in record["rows"]
        if row["chosen"] not in ("absent", "replaced")
        for path in (row["modules"] or [""])
    }
