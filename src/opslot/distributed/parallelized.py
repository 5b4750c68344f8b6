"""Whether a model is parallelized already."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from opslot._base.errors import ConfigError
from opslot.distributed.mixed_precision import has_copies


def check_not_parallelized(model: nn.Module) -> None:
    """Check that no part of `model` is parallelized, by opslot or by the user with torch.

    Raises:
        ConfigError: one is.
    """
    found = next(_parallelized_parts(model), None)
    if found is not None:
        raise ConfigError(
            f"{type(model).__name__.removeprefix('FSDP')} is parallelized already",
            found=found,
            hint="build it again to parallelize it differently, and call opslot.parallelize once, without fully_shard, "
            "DistributedDataParallel or tensor parallelism before",
        )


def _parallelized_parts(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        name = path or "the model"
        if isinstance(module, FSDPModule):
            yield f"{name} is sharded by FSDP2"
        elif isinstance(module, DistributedDataParallel):
            yield f"{name} is a DistributedDataParallel"
        elif has_copies(module):
            yield f"{name} computes with copies of its parameters"
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            yield f"{name} is a DTensor"
