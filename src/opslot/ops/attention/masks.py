"""Masks without a tensor of every query and key: what Transformers' mask functions hide, as documents and chunks.

A window reaches the kernel as `sliding_window`, packed documents and padding as `cu_seq_lens_q`, computed once a step.
Masks that `mask_patterns.py` cannot read are computed by the kernel's own mask function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import pad
from transformers import masking_utils

from opslot._base.boundaries import offsets_of
from opslot._base.errors import KernelError
from opslot._base.logging import get_logger
from opslot.ops._common.arguments import in_autocast_dtype
from opslot.ops._common.documents import same_document
from opslot.ops.attention.contract import AttentionCall
from opslot.ops.attention.layout import Keys, Layout, boundaries_of_thirds
from opslot.ops.attention.mask_patterns import BIDIRECTIONAL, MaskPattern, by_index, pattern_of
from opslot.slots.protocol import FIRST_PADDING, most_padding

logger = get_logger(__name__)


def _layout(pattern: MaskPattern, attention_mask: Tensor | None) -> Layout | str | None:
    """The layout of the global sequences; None if only causality limits attention; a string if it cannot be derived."""
    starts, keys, unseeing = None, None, None
    if pattern.documents is not None:
        starts = pattern.documents.diff(dim=-1) != 0
    elif attention_mask is not None and not bool(attention_mask.all()):
        real = attention_mask.bool()
        starts = real.diff(dim=-1)
        keys = Keys.of(attention_mask) if pattern == BIDIRECTIONAL else None
        if pattern.causal and not bool(real[:, 0].all()):
            unseeing = real.cumsum(-1) == 0
        if bool(((starts & real[:, 1:]).sum(-1) + real[:, 0] > 1).any()):
            return "padding between tokens" if keys is None else Layout(causal=False, keys=keys)
    found = Layout(pattern.causal, window=pattern.window, chunk=pattern.chunk, keys=keys, unseeing=unseeing)
    if starts is None:
        # The attribute `is_causal` of some encoders is wrong (Phi-4 multimodal).
        return None if pattern.causal and pattern.window is None and pattern.chunk is None else found
    cu_seqlens = offsets_of(pad(starts, (1, 0), value=True)).to(torch.int32)
    return found._replace(cu_seqlens=cu_seqlens, longest=int(cu_seqlens.diff().max()))


def applies_any(mask_function: Callable[..., Any]) -> bool:
    """Whether kernels with this mask function apply any mask; FlashAttention's take padding alone."""
    return mask_function is not masking_utils.flash_attention_mask


def local_mask_function(mask_function: Any, **given: Any) -> Layout | None:
    """The mask function of a rank that has a part of each sequence: documents and padding come with the kernel's call.

    Raises:
        KernelError: another mask than Transformers' causal, bidirectional, sliding-window and chunked ones.
    """
    compiling = torch.compiler.is_compiling()
    pattern = None if compiling else pattern_of(mask_function)
    if compiling and not _has_more_parts(mask_function, given):
        return _compiled(given)
    if pattern is None:
        raise KernelError(
            f"sequence parallelism cannot apply this mask ({_shown(mask_function)})",
            hint="set sp_size to 1",
        )
    layout = _layout(pattern._replace(documents=None), None)
    assert not isinstance(layout, str)
    return layout


def _compiled(given: Mapping[str, Any]) -> Layout | None:
    """The layout of a mask with chunks or windows in a compiled model, where Dynamo can't read closures."""
    size = given.get("local_size")
    if size is None:
        return None
    if not _is_bidirectional(given) and size == getattr(given.get("config"), "attention_chunk_size", None):
        return Layout(chunk=size)
    if given.get("use_vmap"):
        # A further function may widen the window; modules have that of Gemma 3's.
        return None
    return Layout(False, window=size + 1) if _is_bidirectional(given) else Layout(True, window=size)


def _has_more_parts(mask_function: Any, given: Mapping[str, Any]) -> bool:
    """In a compiled model, whether a mask has parts that its kernel would not get, such as images whose tokens see each
    other. `_assert_causal` finds such a part where positions may restart."""
    if given.get("use_vmap"):
        # With this setting, Gemma 3 sees both sides in all layers, and its modules have `is_causal` and the window.
        return getattr(given.get("config"), "use_bidirectional_attention", None) is not True
    return bool(getattr(mask_function, "__name__", "") == "or_mask")


def _assert_causal(given: Mapping[str, Any], name: str) -> None:
    """Assert, in a compiled model, that no token sees the next one: tokens of images do, packed documents do not."""
    device = given["device"]
    batch = torch.arange(given["batch_size"], device=device)[:, None, None, None]
    query = torch.arange(given["q_length"] - 1, device=device)[None, None, :, None]
    seen = given["mask_function"](batch, torch.zeros_like(batch), query, query + 1)
    message = (
        f"attn_implementation={name!r} cannot apply a mask in which tokens see later ones, such as those of images"
    )
    torch._assert_async(~seen.any(), f"{message}; pass an attention_mask, or use sdpa or eager")


def _is_padded(given: Mapping[str, Any]) -> bool:
    """In a compiled model, whether a mask is that of a padding mask with causal self-attention or without causality."""
    mask = given["attention_mask"]
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return False
    return _is_bidirectional(given) or ("allow_is_causal_skip" in given and given["q_length"] == given["kv_length"])


def _is_bidirectional(given: Mapping[str, Any]) -> bool:
    """Whether a mask function was called for a mask without causality."""
    return "allow_is_bidirectional_skip" in given


def _padded_rows(layout: Layout, padding_mask: Tensor) -> Layout:
    """A layout with padding [B, S_kv] in a compiled model."""
    keys, length = Keys.in_compiled_model(padding_mask), padding_mask.shape[1]
    found = layout._replace(cu_seqlens=keys.cu_seqlens, longest=length, length=length)
    if layout.causal is False:
        return found._replace(keys=keys)
    return found._replace(unseeing=keys.real.cumsum(-1) == 0)


def _shown(mask_function: Any) -> str:
    return getattr(mask_function, "__qualname__", str(mask_function)).partition(".")[0]


_LEFT_PADDED = "a compiled model reads the first position, which is padding; pad rows on the right"


@dataclass(frozen=True, eq=False)
class MaskFunction:
    """A mask function that returns None or a `Layout` where it can, else what `own` returns.

    In a compiled model packed documents must come as cu_seq_lens_q.

    Attributes:
        own: the kernel's mask function.
        name: the kernel's, for errors.
        falls_back: for a mask that the kernel can't apply, return a dense one.
        at_padding: queries that are padding attend to the keys that are not, instead of to the padding: ALL_PADDING,
            or FIRST_PADDING where only rows that start with padding need it.
        at_padding_of_encoders: the same, in masks without causality.
        any_layout: also where a model asks for a tensor, since opslot passes its reader what it needs.
    """

    own: Callable[..., Any]
    name: str
    _: KW_ONLY
    falls_back: bool = False
    at_padding: str | None = None
    at_padding_of_encoders: str | None = None
    any_layout: bool = False

    def __call__(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Any = 0,
        kv_offset: Any = 0,
        mask_function: Any = masking_utils.causal_mask_function,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        if isinstance(attention_mask, Layout):
            return attention_mask
        given = {
            "batch_size": batch_size,
            "q_length": q_length,
            "kv_length": kv_length,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "mask_function": mask_function,
            "attention_mask": attention_mask,
            "local_size": local_size,
            **kwargs,
        }
        compiling = torch.compiler.is_compiling()
        pattern = None if compiling else pattern_of(mask_function)
        if isinstance(attention_mask, FakeTensor) or (pattern and isinstance(pattern.documents, FakeTensor)):
            compiling, pattern = True, None
        is_causal = pattern is not None and pattern.causal
        # Without a mask, kernels align the last query with the last key. A static cache has unused keys after it; in a
        # compiled model its offset, a tensor, is all that shows it.
        later_keys = isinstance(q_offset, Tensor) or (is_causal and q_offset + q_length < kv_offset + kv_length)
        if later_keys and (is_causal or compiling):
            return self._own_or_dense({**given, "allow_is_causal_skip": False})
        reads = attention_mask is not None and self._reads_padding(given, compiling)
        return self._in_compiled_model(given, reads) if compiling else self._of_pattern(pattern, given, reads)

    def _of_pattern(self, pattern: MaskPattern | None, given: dict[str, Any], reads: bool) -> Any:
        """The mask of a pattern, where queries that are padding attend to the keys that are not if it `reads` them."""
        attention_mask, kv_length, kv_offset = (given[name] for name in ("attention_mask", "kv_length", "kv_offset"))
        if reads and _needs_padding(pattern, attention_mask):
            return self._own_or_dense(given)
        if pattern is None:
            return self._own_or_dense({**given, "mask_function": by_index(given["mask_function"])})
        starts = all(isinstance(x, int) and x == 0 for x in (given["q_offset"], kv_offset))
        skips = given.get("allow_is_causal_skip" if pattern.causal else "allow_is_bidirectional_skip", True)
        if starts and given["q_length"] == kv_length and (skips or self.any_layout or pattern.documents is not None):
            layout = _layout(pattern, attention_mask)
            if reads and isinstance(layout, Layout) and layout.keys is not None:
                layout = layout._replace(cu_seqlens=None, longest=None)
            if not isinstance(layout, str):
                return layout and layout._replace(length=kv_length)
            if self.falls_back and not self.any_layout:
                # A kernel that removes padding between tokens sees other tokens in a window.
                return self._own_or_dense(given)
            if not self._takes_any and pattern.chunk is None:
                padding = self.own(**given)
                return Layout(pattern.causal, window=pattern.window, length=kv_length, padding=padding)
        elif pattern == BIDIRECTIONAL and skips and (attention_mask is None or attention_mask.dim() == 2):
            # Cross attention.
            if attention_mask is None or bool(attention_mask.all()):
                return None
            return Layout(causal=False, length=kv_length, keys=Keys.of(attention_mask))
        # Kernels without masks get a window of earlier keys from the module.
        hides = pattern.window is not None and not pattern.causal
        hides |= pattern.chunk is not None and kv_length + kv_offset > pattern.chunk
        return self._own_or_dense(given) if hides else self.own(**given)

    def _in_compiled_model(self, given: dict[str, Any], reads: bool) -> Any:
        if reads and not self._takes_keys_alone(given):
            return self._own_or_dense(given)
        layout = _compiled(given)
        has_causal_window = layout is not None and layout.window is not None and layout.causal
        if self._takes_any:
            is_layout = layout is not None and given["attention_mask"] is None and not has_causal_window
            return layout if is_layout else self.own(**given)
        if _has_more_parts(given["mask_function"], given):
            return self._own_or_dense(given)
        if layout is not None and layout.window is not None and given["q_length"] != given["kv_length"]:
            # A cache keeps the keys of a causal window alone.
            return self.own(**given) if has_causal_window else self._own_or_dense(given)
        if given["local_size"] is None and given["mask_function"].__name__ == "and_mask":
            _assert_causal(given, self.name)
        if not _is_padded(given):
            return self.own(**given) if layout is None else layout._replace(length=given["kv_length"])
        # Modules of the masks that `_has_more_parts` lets through have what these masks do.
        causal = None if given.get("use_vmap") else not _is_bidirectional(given)
        layout = _padded_rows(layout or Layout(causal), given["attention_mask"])
        return layout._replace(cu_seqlens=None, longest=None) if reads else layout

    @property
    def _takes_any(self) -> bool:
        return applies_any(self.own)

    def _reads_padding(self, given: dict[str, Any], compiling: bool) -> bool:
        """Whether queries that are padding attend to the keys that are not."""
        of_encoders = {self.at_padding, self.at_padding_of_encoders}
        where = most_padding(of_encoders) if _is_bidirectional(given) else self.at_padding
        if where != FIRST_PADDING or (compiling and (self._takes_any or self._takes_keys_alone(given))):
            return where is not None
        tokens_first = given["attention_mask"][:, 0].all()
        if compiling:
            torch._assert_async(tokens_first, f"attn_implementation={self.name!r}: {_LEFT_PADDED}")
            return False
        return not bool(tokens_first)

    def _takes_keys_alone(self, given: dict[str, Any]) -> bool:
        """In a compiled model, whether padding hides keys alone, from all queries."""
        return not self._takes_any and _is_bidirectional(given) and given["local_size"] is None

    def _own_or_dense(self, given: dict[str, Any]) -> Any:
        """The mask of `own` if it takes any mask, else a dense one or an error."""
        if self._takes_any:
            return self.own(**given)
        if self.falls_back:
            return masking_utils.sdpa_mask(**{**given, "allow_is_causal_skip": False})
        raise KernelError(
            f"attn_implementation={self.name!r} cannot apply this mask ({_shown(given['mask_function'])}, "
            f"{given['q_length']} queries, {given['kv_length']} keys)",
            hint="use sdpa or eager",
        )


def _needs_padding(pattern: MaskPattern | None, attention_mask: Tensor) -> bool:
    """Whether no `Layout` lets queries that are padding attend to the keys that are not."""
    return pattern not in (None, BIDIRECTIONAL) and not bool(attention_mask.all())


def _with_documents(mask: Tensor, batch: int, kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """A dense mask [B or 1, 1, S, S_kv], such as that of image tokens which see each other, within documents."""
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if cu_seqlens is None:
        return mask, kwargs
    length, keys = mask.shape[-2:]
    if length != keys:
        raise KernelError(
            f"cu_seq_lens_q with a mask of {length} queries and {keys} keys", hint="leave one of them out"
        )
    same = same_document(cu_seqlens, batch, length, mask.device)
    kept = {name: value for name, value in kwargs.items() if not name.startswith(("cu_seq_lens_", "max_length_"))}
    if mask.dtype == torch.bool:
        return mask & same, kept
    return mask.masked_fill(~same, torch.finfo(mask.dtype).min), kept


def reads_layout(kernel: Callable[..., Any], dense: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """An attention `kernel` whose mask may be a `Layout`, and which may be called with `cross_attention`.

    Under autocast it runs in autocast's dtype, as torch's does: norms of queries and keys may return float32.

    Args:
        dense: runs instead of the kernel where the mask is a dense one [B, 1, S, S_kv].

    Raises:
        KernelError: when called with a dense mask that neither can apply.
    """
    if getattr(kernel, "reads_layout", False):
        return kernel
    any_mask = applies_any(getattr(kernel, "mask_function", masking_utils.sdpa_mask))
    packs_keys = getattr(kernel, "packs_keys", None)

    @functools.wraps(kernel)
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        cross_attention: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        function, unseeing = kernel, None
        if kwargs.get("output_attentions") and not torch.compiler.is_compiling():
            _warn_of_weights(type(module).__name__)
        query, key, value = in_autocast_dtype(query, key, value)
        is_layout = isinstance(attention_mask, Layout)
        has_keys_alone = is_layout and attention_mask.keys is not None and attention_mask.cu_seqlens is None
        if cross_attention or has_keys_alone:
            kwargs = {n: x for n, x in kwargs.items() if not n.startswith(("cu_seq_lens_", "max_length_"))}
            kwargs |= {"is_causal": False, "sliding_window": None}
            keys = attention_mask.keys if is_layout else None
            if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
                # A compiled model gets the padding mask itself, without a `Layout`.
                keys_of = Keys.in_compiled_model if torch.compiler.is_compiling() else Keys.of
                keys = keys_of(attention_mask[:, -key.shape[2] :])
            if keys is not None and (not any_mask or (packs_keys is not None and packs_keys(query, value))):
                call = AttentionCall(module, query, key, value, None, dropout, scaling, kwargs)
                return _over_keys(keys, kernel, call)
            if keys is not None:
                attention_mask = keys.real[:, None, None].expand(-1, 1, query.shape[2], -1)
            elif is_layout:
                attention_mask = None
            function = (dense or kernel) if attention_mask is not None else kernel
        elif is_layout:
            unseeing = attention_mask.unseeing
            kwargs, attention_mask = attention_mask.arguments(query, kwargs), attention_mask.padding
        elif isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
            attention_mask, kwargs = _with_documents(attention_mask, query.shape[0], kwargs)
            function = dense or kernel
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4 and function is kernel and not any_mask:
            raise KernelError(
                f"{getattr(kernel, '__name__', kernel)} cannot apply a dense mask {tuple(attention_mask.shape)}, which "
                f"{type(module).__name__} was given",
                hint="use sdpa or eager",
            )
        found = function(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        return found if unseeing is None else (found[0].masked_fill(unseeing[:, :, None, None], 0), *found[1:])

    attend.reads_layout = True  # type: ignore[attr-defined]
    return attend


@functools.cache
def _warn_of_weights(name: str) -> None:
    logger.warning(
        "%s was called with output_attentions=True, and its kernel does not return the weights of attention; "
        "set attn_implementation to eager for them",
        name,
    )


def _over_keys(keys: Keys, kernel: Callable[..., Any], call: AttentionCall) -> tuple[Tensor, None]:
    """Attention of all queries to the keys that are not padding, each row a document."""
    module, query, key, value, _, dropout, scaling, kwargs = call
    batch, _, length, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if keys.places is None:
        # In each row the queries stand beside the keys that are not padding, and none beside the padding around them.
        first = torch.zeros_like(keys.real[:, :1], dtype=torch.int64)
        queries = boundaries_of_thirds(length, first, first + length)
    else:
        k, v = (x.index_select(0, keys.places) for x in (k, v))
        queries = _rows(batch, length, query.device)
    bounds = {"cu_seq_lens_q": queries, "max_length_q": length}
    bounds |= {"cu_seq_lens_k": keys.cu_seqlens, "max_length_k": keys.longest}
    flat = (x[None].transpose(1, 2) for x in (q, k, v))
    out = kernel(module, *flat, None, dropout=dropout, scaling=scaling, **kwargs, **bounds)[0]
    return out.unflatten(1, (batch, length)).squeeze(0), None


@functools.lru_cache(maxsize=8)
def _rows(batch: int, length: int, device: torch.device) -> Tensor:
    """cu_seqlens int32 [B + 1] of whole rows."""
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
