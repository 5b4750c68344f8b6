"""Hooks that keep packed documents apart: boundaries for modules that run once for each, and no cache for models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opslot._base.source import method_parameters
from opslot.models._hooks import add_pre_hook
from opslot.ops._common.by_document import add_documents
from opslot.ops._common.documents import (
    assert_no_restart,
    given_arguments,
    has_cache,
    may_pack,
    models_around,
    positions_of_documents,
)
from opslot.slots.protocol import attention_options, modules_by_document


def give_documents(model: nn.Module) -> None:
    """Let models separate documents by positions that restart.

    Those around modules that run for each document derive cu_seqlens, and those with attention make no cache.
    """
    attention = [
        path
        for path, module in model.named_modules()
        if "Attention" in type(module).__name__ or attention_options(module) is not None
    ]
    for holder in models_around(model, [path for path, _ in modules_by_document(model)]):
        add_pre_hook(holder, _add_documents)
    decoders = {id(holder) for holder in models_around(model, attention)}
    for part in model.modules():
        is_around = hasattr(part, "base_model_prefix") and any(id(inner) in decoders for inner in part.modules())
        # Models around a decoder may make its cache: Idefics3.
        if id(part) in decoders or (is_around and "use_cache" in method_parameters(type(part))):
            add_pre_hook(part, _without_cache)


def _add_documents(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """`add_documents`, which kernels register and remove too."""
    return add_documents(model, args, kwargs)


def _without_cache(model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook: no cache of packed documents, unless asked for, since with one Transformers' masks ignore
    positions that restart."""
    if kwargs.get("use_cache") is not None or not getattr(model.config, "use_cache", False):
        return None
    given = given_arguments(model, args, kwargs)
    if given.get("cu_seq_lens_q") is not None and not has_cache(given):
        # Positions of a shard of a sequence restart on some ranks only, and states of a cache are gathered.
        return args, {**kwargs, "use_cache": False}
    positions = positions_of_documents(given)
    if positions is None:
        return None
    # A compiled model cannot read positions, and training needs no cache.
    compiling = torch.compiler.is_compiling()
    packed = torch.is_grad_enabled() if compiling else may_pack(positions)
    if compiling and not packed:
        assert_no_restart(model, positions, "a cache is made: pass use_cache=False")
    return (args, {**kwargs, "use_cache": False}) if packed else None
