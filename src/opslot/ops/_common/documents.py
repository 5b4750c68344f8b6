"""Boundaries of packed documents: checks of cu_seqlens, and cu_seqlens from positions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opslot._base.boundaries import BOUNDARIES, offsets_of
from opslot._base.host_values import host_values, largest_step
from opslot._base.source import method_parameters, takes_text_axis
from opslot._base.tensor_cache import TensorCache
from opslot.ops._common.arguments import reject
from opslot.slots.protocol import BY_DOCUMENT, keeps_sequences

# What Transformers calls a cache in forwards: `cache` from 5.24, one of the others before.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")

_INSTEAD = "it must start with 0, not decrease, and end with the number of tokens; padding is also a document"
_checked: TensorCache[None] = TensorCache(8)


def check_cu_seqlens(
    kernel: str, argument: str, cu_seqlens: Tensor, rows: int, length: int, longest: int | None = None
) -> None:
    """Reject cu_seqlens that do not cover all tokens, or with a document that crosses rows: kernels leave the
    output outside documents uninitialized.

    cu_seqlens on a CPU are checked at once. On a GPU they are checked by an asynchronous device-side assertion that
    names the kernel, without a synchronization. Under torch.compile they are not checked.

    Args:
        kernel: its configuration, e.g. "attn_implementation='flash_attention_4'".
        argument: name of `cu_seqlens` [documents + 1].
        rows, length: shape of the tokens; the last boundary must be rows * length.
        longest: the caller's maximum document length; kernels ignore tokens beyond it.

    Raises:
        KernelError: the boundaries are known not to cover the tokens.
    """
    tokens = rows * length
    if torch.compiler.is_compiling() or type(cu_seqlens) is not Tensor:
        return
    if cu_seqlens.is_cuda:
        _assert_on_device(kernel, argument, cu_seqlens, rows, length, longest)
    elif cu_seqlens.device.type == "cpu":
        boundaries = cu_seqlens.tolist()
        lengths = [stop - start for start, stop in itertools.pairwise(boundaries)]
        if not boundaries or boundaries[0] != 0 or min(lengths, default=0) < 0:
            reject(kernel, argument, f"it is {_shown(boundaries)}, not rising from 0", _INSTEAD)
        if boundaries[-1] != tokens:
            reject(kernel, argument, f"it ends with {boundaries[-1]} where there are {tokens} tokens", _INSTEAD)
        crossed = [end for end in range(length, tokens, max(length, 1)) if end not in boundaries]
        if crossed:
            found = f"a document crosses token {crossed[0]}, where a row of {length} ends"
            reject(kernel, argument, found, "end documents at the ends of rows, or pass one row")
        if longest is not None and max(lengths, default=0) > longest:
            found = f"its longest document has {max(lengths)} tokens, but max_length is {longest}"
            reject(kernel, argument, found, "pass the correct max_length, or omit it")


def longest_document(cu_seqlens: Tensor, given: int | Tensor | None = None) -> int:
    """Tokens of the longest document: `given`, else from cu_seqlens, without a synchronization if the host has them.

    A tensor `given` is not read where the host has cu_seqlens.
    """
    if given is not None and not isinstance(given, Tensor):
        return given
    known = largest_step(cu_seqlens)
    if known is None:
        known = int(cu_seqlens.diff().max() if given is None else given)
    return known


def one_row(x: Tensor) -> Tensor:
    """[B, S, ...] as [1, B * S, ...]: rows are flattened where cu_seqlens has the boundaries of rows and documents."""
    return x.reshape(1, -1, *x.shape[2:])


def innermost_models(model: nn.Module, inside: Iterable[str]) -> list[nn.Module]:
    """The innermost models around the modules of some names."""
    models = [path for path, module in model.named_modules() if hasattr(module, "base_model_prefix")]
    around = ([m for m in models if not m or path.startswith(f"{m}.")] for path in inside)
    innermost = {max(paths, key=len, default="") for paths in around}
    return [model.get_submodule(path) for path in sorted(innermost)]


def models_around(model: nn.Module, inside: Iterable[str]) -> list[nn.Module]:
    """`innermost_models`, except those in which tokens are also mixed elsewhere."""
    return [holder for holder in innermost_models(model, inside) if keeps_sequences(holder) is None]


def cu_seqlens_in(kwargs: Mapping[str, Any]) -> Tensor | None:
    """Boundaries of packed documents in a forward's keyword arguments, over the flattened tokens; None without."""
    cu_seqlens, seq_idx = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
    if cu_seqlens is not None or seq_idx is None:
        return cu_seqlens
    # Where a module takes only seq_idx, its callers pass the boundaries as it, [documents + 1].
    if seq_idx.dim() == 1:
        return seq_idx
    return offsets_of(F.pad(seq_idx.diff(dim=1) != 0, (1, 0), value=True)).to(torch.int32)


def documents_in(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a head from which the layers of its model read the boundaries of documents."""
    return {name: kwargs[name] for name in ("position_ids", *BOUNDARIES, "seq_idx") if name in kwargs}


def documents_for(module: Any, classes: tuple[type, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`documents_in` for a module of these classes, or one that may run once for each document; others take none."""
    takes = isinstance(module, classes) or getattr(type(module), BY_DOCUMENT, False)
    return documents_in(kwargs) if takes else {}


def remove_document_hooks(model: nn.Module, hooks: list[Any]) -> None:
    """Remove what `add_document_hooks` returned."""
    for hook in hooks:
        hook.remove()


def given_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `module` by name."""
    names = method_parameters(type(module)) if args else ()
    return {**dict(zip(names, args, strict=False)), **kwargs}


def has_cache(given: Mapping[str, Any]) -> bool:
    """Whether a forward's arguments by name include a cache."""
    return any(given.get(name) is not None for name in CACHE_ARGUMENTS)


def positions_of_documents(given: Mapping[str, Any]) -> Tensor | None:
    """position_ids [B, S] of a forward's arguments where they may restart at documents; None where not."""
    positions = given.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() == 3 and positions.shape[0] == 4:
        # Those of the text, followed by time, height and width.
        positions = positions[0]
    known = given.get("attention_mask") is not None or has_cache(given)
    return positions if isinstance(positions, Tensor) and positions.dim() == 2 and not known else None


def positions_restart(model: Any, given: Mapping[str, Any], reason: str, *, may_wait: bool = True) -> bool:
    """Whether position_ids in a forward's arguments start again within a row, as those of packed documents do.

    Padding on either side, whose positions are equal, is not a document, nor is one token. A compiled model asserts
    that they do not, as `assert_no_restart`.

    Args:
        may_wait: also read positions that only a device has, which is a synchronization.
    """
    positions = positions_of_documents(given)
    if positions is None or positions.is_meta:
        return False
    if torch.compiler.is_compiling():
        assert_no_restart(model, positions, reason)
        return False
    positions = host_values(positions)
    return (may_wait or positions.device.type == "cpu") and bool(_restart_anywhere(positions))


def _restart_anywhere(positions: Tensor) -> Tensor:
    step = positions.diff(dim=1)
    rises = (step == 1).int()
    before, after = rises.cumsum(1) - rises, rises.flip(1).cumsum(1).flip(1) - rises
    return ((step < 0) & (before > 0) & (after > 0)).any()


def assert_no_restart(model: Any, positions: Tensor, reason: str) -> None:
    """Let the graph of a compiled model raise a RuntimeError if positions [B, S] restart where it runs.

    Reading them would split the graph. On a GPU the assertion is asynchronous.
    """
    _assert_in_graph(model, _restart_anywhere(positions), f"position_ids restart, and {reason}")


def _assert_in_graph(model: Any, is_wrong: Tensor, reason: str) -> None:
    torch._assert_async(~is_wrong, f"{type(model).__name__} cannot keep packed documents apart: {reason}")


def may_pack(positions: Tensor) -> bool:
    """Whether positions [B, S] do not rise within a row, as where a document follows another; reads their values.

    True also for padding and documents of one token. Positions that only skip numbers are those of one document.
    """
    return bool((positions.diff(dim=1) < 1).any())


def has_position_axes(model: Any) -> bool:
    """Whether the rotary embedding of a decoder takes positions of several axes: time, height and width."""
    return "mrope_section" in (getattr(getattr(model, "config", None), "rope_parameters", None) or {})


def masks_drop_positions(model: Any) -> bool:
    """Whether a decoder with several axes of positions makes its masks without any of them."""
    return has_position_axes(model) and not any(takes_text_axis(type(module)) for module in model.modules())


def assert_separated(model: Any, positions: Tensor | None, cu_seqlens: Tensor, length: int) -> None:
    """Let the graph of a compiled model raise a RuntimeError if `continued_at` would find a token, where it runs.

    Args:
        positions: [B, S]; None where no document may start inside a row of `length`.
    """
    reason = "position_ids do not restart where documents of cu_seq_lens_q start"
    if positions is None:
        _assert_in_graph(model, ((cu_seqlens > 0) & (cu_seqlens < length)).any(), reason)
        return
    continues = F.pad(positions.diff(dim=1) == 1, (1, 0)).flatten()
    # Boundaries from the last token on start no document.
    at = cu_seqlens.to(positions.device, torch.long).clamp(max=len(continues))
    _assert_in_graph(model, F.pad(continues, (0, 1))[at].any(), reason)


def continued_at(positions: Tensor, cu_seqlens: Tensor) -> int | None:
    """The first token that starts a document of `cu_seqlens` and continues the positions [B, S] of the one before."""
    continues = F.pad(positions.diff(dim=1) == 1, (1, 0))
    starts = cu_seqlens[cu_seqlens < positions.numel()].to(positions.device, torch.long)
    found = starts[continues.flatten()[starts]]
    return int(found[0]) if len(found) else None


def positions_in_documents(cu_seqlens: Tensor, states: Tensor) -> Tensor:
    """position_ids [B, S] of packed documents for `states` [B, S, ...]; those after the last boundary are another."""
    rows, length = states.shape[:2]
    token = torch.arange(rows * length, device=states.device)
    bounds = cu_seqlens.to(states.device, token.dtype)
    start = bounds[torch.searchsorted(bounds[1:], token, right=True)]
    return (token - start.maximum(token - token % length)).view(rows, length)


def document_of_tokens(cu_seqlens: Tensor, rows: int, length: int, device: torch.device) -> Tensor:
    """int64 [B, S]: the number of each token's document; tokens after the last boundary are another document."""
    token = torch.arange(rows * length, device=device)
    return torch.searchsorted(cu_seqlens[1:].to(device, token.dtype), token, right=True).view(rows, length)


def same_document(cu_seqlens: Tensor, rows: int, length: int, device: torch.device) -> Tensor:
    """bool [B, 1, S, S]: whether two tokens of a row are of one document."""
    document = document_of_tokens(cu_seqlens, rows, length, device)[:, None]
    return document[..., :, None] == document[..., None, :]


def _shown(boundaries: list[int]) -> str:
    return str(boundaries) if len(boundaries) <= 8 else f"[{', '.join(map(str, boundaries[:7]))}, ...]"


def _assert_on_device(
    kernel: str, argument: str, cu_seqlens: Tensor, rows: int, length: int, longest: int | None
) -> None:
    found = f"does not cover {rows} rows of {length} tokens with documents of at most {longest or length}"

    def check() -> None:
        covered = _covers(cu_seqlens, rows, length, longest)
        torch._assert_async(covered, f"{kernel}: {argument} {found}; {_INSTEAD}")

    _checked.get(cu_seqlens, check, rows, length, longest)


def _covers(cu_seqlens: Tensor, rows: int, length: int, longest: int | None) -> Tensor:
    lengths = cu_seqlens.diff()
    right = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == rows * length) & (lengths >= 0).all()
    if rows > 1:
        ends = torch.arange(1, rows, device=cu_seqlens.device) * length
        right &= torch.isin(ends, cu_seqlens).all()
    if longest is not None:
        right &= (lengths <= longest).all()
    return right
