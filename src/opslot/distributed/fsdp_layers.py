"""The layers of a model, each of which is one parameter group of FSDP2."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from opslot._base.errors import ConfigError


def find_layers(model: nn.Module, names: Collection[str] | None) -> list[nn.Module]:
    """The modules of the given classes, in the model's order, without those whose weights others use too.

    By default the classes that the model's `_no_split_modules` names, else its layers that Transformers can checkpoint,
    else the blocks in its module lists.
    """
    if names is None:
        names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
        names = names or {type(module).__name__ for module in model.modules() if _is_checkpointing_layer(module)}
        names = names or set(_classes_in_lists(model))
    found = [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]
    owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    # Models with images call the embeddings of their language model.
    owners.update(id(p) for embeddings in _input_embeddings(model) for p in embeddings.parameters())
    found = [module for module in found if not _is_shared(module, owners)]
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no layers to shard one by one",
            found=f"no module of a class named {', '.join(sorted(names)) or '(its _no_split_modules is empty)'}",
            hint="pass layers=[...] with the class names of its blocks",
        )
    return found


def _classes_in_lists(module: nn.Module) -> Iterator[str]:
    """Class names of the modules in the outermost module lists of `module`, without single layers such as norms."""
    for child in module.children():
        is_block = isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList)
        if not is_block:
            yield from _classes_in_lists(child)
        elif any(True for _ in child.children()):
            yield type(child).__name__


def _is_checkpointing_layer(module: nn.Module) -> bool:
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


def _input_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        get: Any = getattr(module, "get_input_embeddings", None)
        # Towers may have none.
        with contextlib.suppress(AttributeError, NotImplementedError):
            found = get and get()
            if isinstance(found, nn.Module):
                yield found


def _is_shared(module: nn.Module, owners: Counter[int]) -> bool:
    """Whether a parameter of a module has more `owners` than those in it, as embeddings that are tied to a head."""
    own = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
    return any(owners[parameter] > count for parameter, count in own.items())
