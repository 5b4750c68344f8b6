"""Lets modules that run once for each packed document know the documents."""

from __future__ import annotations

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
    for module in model.modules():
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _add_documents]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def _add_documents(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return add_documents(model, args, kwargs)
