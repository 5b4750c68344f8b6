"""Hooks on models that get packed documents: positions that restart for `cu_seq_lens_q`, or an error where documents
would see each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opslot._base.errors import KernelError
from opslot._base.source import method_parameters, takes_text_axis
from opslot.models._hooks import add_pre_hook
from opslot.models._multimodal.modalities import decoder_of
from opslot.ops._common.by_document import add_documents
from opslot.ops._common.documents import (
    given_arguments,
    has_cache,
    has_position_axes,
    innermost_models,
    masks_drop_positions,
    positions_in_documents,
    positions_restart,
)
from opslot.ops.attention.op import skipped_attention
from opslot.slots.binding import class_name
from opslot.slots.protocol import (
    attention_options,
    attention_skip,
    computes_attention,
    indexers,
    is_own_attention,
    mixes_documents,
    modules_by_document,
    unknown_layers,
)

_PADDED = "pass each document in a row of its own, padded, with an attention_mask"


def separate_documents(model: nn.Module) -> None:
    """Let models that would mix packed documents raise for `cu_seq_lens_q` and for positions that restart, and others
    derive positions from `cu_seq_lens_q`.

    Models that get no position_ids would count them through a whole row, and masks of Transformers are made of them.
    Decoders with several axes of positions make masks of those of the text, which [B, S] alone do not reach.
    """
    decoder = decoder_of(model)
    models: list[Any] = [module for module in model.modules() if hasattr(module, "base_model_prefix")]
    for part in models:
        if takes_text_axis(type(part)) and "position_ids" in method_parameters(type(part)):
            add_pre_hook(part, _add_text_axis, prepend=True)
        if masks_drop_positions(part):
            add_pre_hook(part, _add_boundaries, prepend=True)
        # With towers, what reads documents is the language model.
        inside = decoder if decoder is not None and any(module is decoder for module in part.modules()) else part
        problem = _problem(inside)
        if problem is not None:
            add_pre_hook(part, _Reject(problem))
        elif _counts_positions(part, inside):
            add_pre_hook(part, _add_positions, prepend=True)
    modules = model.named_modules()
    attention = [path for path, module in modules if attention_options(module) is not None or attention_skip(module)]
    for part in innermost_models(model, attention):
        if {"input_ids", "position_ids"} <= {*method_parameters(type(part))} and _masks_of_padding(part):
            add_pre_hook(part, _give_boundaries)


def _problem(part: nn.Module) -> str | None:
    """Why no kernel of attention separates the documents of a model; None where one can."""
    alone = {id(module) for _, outer in modules_by_document(part) for module in outer.modules()}
    alone |= {id(module) for module in indexers(part, by_kernel=True)}
    modules = [module for module in part.modules() if id(module) not in alone]
    unknown = next(filter(None, map(unknown_layers, modules)), None)
    found = next(filter(None, map(mixes_documents, modules)), None)
    if found is not None or unknown is None:
        return found
    if getattr(getattr(part, "config", None), "is_encoder_decoder", False):
        return unknown
    own = next((type(module).__name__ for module in modules if computes_attention(module)), None)
    return f"{own} computes attention itself, without Transformers' interface" if own else None


@dataclass(frozen=True)
class _Reject:
    """Forward pre-hook of a model that cannot keep documents apart, and why."""

    problem: str

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        packed_by = "cu_seq_lens_q" if kwargs.get("cu_seq_lens_q") is not None else None
        if packed_by is None:
            given = given_arguments(model, args, kwargs)
            if positions_restart(model, given, self.problem, may_wait=False):
                packed_by = "position_ids that restart"
        if packed_by is not None:
            raise KernelError(
                f"{class_name(model)} cannot keep packed documents ({packed_by}) apart",
                found=self.problem,
                hint=_PADDED,
            )


def _masks_of_padding(part: nn.Module) -> bool:
    """Whether the masks of a model may be of padding alone, as those of models whose tokens see later ones are."""
    variants = {found[0] for module in part.modules() if (found := attention_options(module)) is not None}
    return "bidirectional" in variants or unknown_layers(part) is not None


def _give_boundaries(model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of a model whose masks do not separate documents by positions: a kernel gets their boundaries.

    Raises:
        KernelError: the attention is Transformers' own, which takes no boundaries.
    """
    given = given_arguments(model, args, kwargs)
    reason = "masks are of padding alone: pass cu_seq_lens_q and bind a kernel"
    if kwargs.get("cu_seq_lens_q") is not None or not positions_restart(model, given, reason):
        return None
    implementation = str(model.config._attn_implementation)
    if is_own_attention(implementation) or "flash" in implementation:
        return add_documents(model, (), given)
    skipped = skipped_attention(model.modules())
    ignored = f"Transformers' {implementation} ignores position_ids that restart"
    raise KernelError(
        f"{class_name(model)} cannot keep packed documents (position_ids that restart) apart",
        found=f"{skipped}, and {ignored}" if skipped else ignored,
        hint=("" if skipped else "bind a kernel of attention, e.g. attn_implementation: sdpa, or ") + _PADDED,
    )


def _counts_positions(part: Any, decoder: Any) -> bool:
    """Whether a decoder, or a model around it, counts positions through a row if it gets none.

    Models around a decoder with several axes derive them from images.
    """
    variants = {found[0] for module in decoder.modules() if (found := attention_options(module)) is not None}
    judged = not any(map(unknown_layers, decoder.modules()))
    counts = part is decoder or not has_position_axes(decoder)
    return "position_ids" in method_parameters(type(part)) and "bidirectional" not in variants and judged and counts


def _add_positions(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook: position_ids [B, S] of the documents of `cu_seq_lens_q`, where there are none."""
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if cu_seqlens is None:
        return None
    given = given_arguments(model, args, kwargs)
    if has_cache(given) or any(given.get(name) is not None for name in ("position_ids", "attention_mask")):
        return None
    states = next((x for name in ("input_ids", "inputs_embeds") if (x := given.get(name)) is not None), None)
    if states is None:
        return None
    return (), {**given, "position_ids": positions_in_documents(cu_seqlens, states)}


def _add_text_axis(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook: position_ids [B, S] as [4, B, S], those of the text before those of each axis."""
    given = given_arguments(model, args, kwargs)
    positions = given.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return None
    return (), {**given, "position_ids": positions.expand(4, -1, -1)}


def _add_boundaries(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """`add_documents`, except in a compiled model, which asserts that there are no boundaries to add."""
    if not torch.compiler.is_compiling():
        return add_documents(model, args, kwargs)
    if kwargs.get("cu_seq_lens_q") is None:
        given = given_arguments(model, args, kwargs)
        positions_restart(model, given, "masks are made without them: pass cu_seq_lens_q")
    return None
