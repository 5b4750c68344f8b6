"""Hooks by which modules that run once for each packed document get the boundaries of the documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from opslot.ops._common.documents import add_documents, models_around
from opslot.slots.protocol import modules_by_document


def give_documents(model: nn.Module) -> None:
    """Let the models around modules that run for each document derive cu_seqlens from positions that restart."""
    for holder in models_around(model, [path for path, _ in modules_by_document(model)]):
        if _add_documents not in holder._forward_pre_hooks.values():
            holder.register_forward_pre_hook(_add_documents, with_kwargs=True)


def stop_giving_documents(model: nn.Module) -> None:
    """Undo `give_documents`."""
    remove_forward_pre_hooks(model, _add_documents)


def remove_forward_pre_hooks(model: nn.Module, hook: Callable[..., Any]) -> None:
    """Remove `hook` from all modules of `model`."""
    for module in model.modules():
        for key in [key for key, known in module._forward_pre_hooks.items() if known is hook]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def _add_documents(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """`add_documents`, which ops register too, as a function that only `stop_giving_documents` removes."""
    return add_documents(model, args, kwargs)
