"""Which parameters of a model are sharded over which mesh axis, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from opslot._base.errors import ConfigError, list_problems
from opslot.distributed.parallel_state import ParallelState, divisors, get_parallel_state


@dataclass(frozen=True)
class ParallelPlan:
    """Parameters that are sharded beyond what FSDP does.

    Attributes:
        extra_parallel_plan: axis ("ep") to {parameter name: placement}. A `*` matches one component of a name, as
            in "model.layers.*.mlp.experts.gate_up_proj". The placement is Shard(0): ranks hold whole experts.

    Raises:
        ConfigError: another axis or placement.
    """

    extra_parallel_plan: Mapping[str, Mapping[str, Shard]]

    def __post_init__(self) -> None:
        unknown = sorted(set(self.extra_parallel_plan) - {"ep"})
        if unknown:
            raise ConfigError(f"unknown axis {', '.join(unknown)} in a parallel plan", hint="use ep")
        for name, placement in self.extra_parallel_plan.get("ep", {}).items():
            if placement != Shard(0):
                raise ConfigError(
                    f"a parallel plan places {name} as {placement}, but ep shards experts, which are dim 0",
                    hint="set it to Shard(0)",
                )

    def below(self, path: str) -> ParallelPlan:
        """This plan for a model that has the planned model as its submodule `path`; "" is the model itself."""
        prefix = f"{path}." if path else ""
        return ParallelPlan(
            {
                axis: {prefix + name: placement for name, placement in names.items()}
                for axis, names in self.extra_parallel_plan.items()
            }
        )

    def match(self, model: nn.Module) -> dict[str, Shard]:
        """Placement of each parameter that the plan names.

        Raises:
            ConfigError: a name that matches no parameter, with the model's names that end like it.
        """
        names = [name for name, _ in model.named_parameters()]
        placements: dict[str, Shard] = {}
        problems = []
        for pattern, placement in self.extra_parallel_plan.get("ep", {}).items():
            regex = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
            found = [name for name in names if regex.fullmatch(name)]
            placements |= dict.fromkeys(found, placement)
            if not found:
                last = pattern.rsplit(".", 1)[-1]
                alike = next((name for name in names if name.rsplit(".", 1)[-1] == last), None)
                problems.append(
                    f"{pattern}: " + (f"the model has e.g. {alike}" if alike else f"nothing ends in {last}")
                )
        if problems:
            raise ConfigError(
                list_problems(
                    f"the parallel plan of {type(model).__name__} names parameters that do not exist", problems
                ),
                hint="use the names of model.named_parameters(), with * for layer numbers",
            )
        return placements

    def apply(self, model: nn.Module, state: ParallelState | None = None) -> list[str]:
        """Replace every parameter that the plan names by this rank's shard, a DTensor over ep.

        Every rank must hold the same values, or parameters on meta.

        Returns:
            FQNs of the modules that own them.

        Raises:
            ConfigError: a name that matches nothing, or a dim that ep does not divide.
        """
        state = state or get_parallel_state()
        placements = self.match(model)
        owners = sorted({name.rpartition(".")[0] for name in placements})
        if state.ep_mesh is None:
            return owners
        for name, placement in placements.items():
            size = model.get_parameter(name).shape[placement.dim]
            if size % state.ep:
                raise ConfigError(
                    f"ep={state.ep} does not divide the {size} experts of {name}",
                    hint=f"use one of {divisors(size)}",
                )
        for name, placement in placements.items():
            path, _, key = name.rpartition(".")
            whole = model.get_parameter(name)
            part = whole.detach().chunk(state.ep, placement.dim)[state.ep_rank].clone()
            shard = DTensor.from_local(part, state.ep_mesh, [placement], run_check=False)
            owner = model.get_submodule(path)
            owner.register_parameter(key, nn.Parameter(shard, requires_grad=whole.requires_grad))
        return owners
