"""What an attention mask hides, as documents, windows and chunks instead of a tensor of every query and key."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from opslot._base.tensor_cache import TensorCache
from opslot.ops._common.documents import document_of_tokens


class Keys(NamedTuple):
    """Keys, or queries, that are not padding.

    Attributes:
        real: bool [B, S_kv].
        places: of these keys among all B * S_kv; None in a compiled model, where their number would depend on values.
        cu_seqlens: int32 [B + 1], of these keys in each row; without `places` [3 B + 1], of the padding before them,
            of them, and of the padding after them.
        longest: most of them in a row, or more.
    """

    real: Tensor
    places: Tensor | None
    cu_seqlens: Tensor
    longest: int

    @staticmethod
    def of(padding_mask: Tensor) -> Keys:
        """The keys that a padding mask [B, S_kv] shows."""
        real = padding_mask.bool()
        counts = real.sum(1)
        cu_seqlens = pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        return Keys(real, real.flatten().nonzero().flatten(), cu_seqlens, int(counts.max()))

    @staticmethod
    def in_compiled_model(padding_mask: Tensor) -> Keys:
        """Those of rows of padding, tokens and padding, any of them empty.

        Their number does not depend on values, which compiled code could not read. Padding between tokens fails an
        assertion on the device.
        """
        length = padding_mask.shape[1]
        real = padding_mask.bool()
        first = (real.cumsum(-1) == 0).sum(-1, keepdim=True)
        end = first + real.sum(-1, keepdim=True)
        position = torch.arange(length, device=real.device)
        adjacent = (real == ((position >= first) & (position < end))).all()
        message = "compiled attention kernels take no padding between tokens; use sdpa or eager"
        torch._assert_async(adjacent, message)
        return Keys(real, None, boundaries_of_thirds(length, first, end), length)


def boundaries_of_thirds(length: int, first: Tensor, end: Tensor) -> Tensor:
    """cu_seqlens int32 [3 B + 1] of rows of `length` tokens that have boundaries at `first` and `end` [B, 1]."""
    row = torch.arange(first.shape[0], device=first.device)[:, None] * length
    bounds = torch.cat([row, row + first, row + end], 1).flatten()
    # A padding value would make the number of tokens constant.
    return torch.cat([bounds, row[-1] + length]).to(torch.int32)


class Layout(NamedTuple):
    """An attention mask of documents, or of keys that are not padding.

    Attributes:
        causal: whether it is causal; None leaves it to the module.
        cu_seqlens: int32 [documents + 1] over B * S tokens; None where each row is one document.
        longest: tokens of the longest document, with `cu_seqlens`.
        window: sliding window, in tokens; without causality, of `window - 1` tokens to either side.
        chunk: keys are visible to queries of the same chunk; chunks are counted from the start of each document.
        length: tokens of a row, where they are known.
        keys: without causality, those that are not padding. Cross attention has them alone, whatever the documents.
        unseeing: bool [B, S], with causality, queries before the first key that is not padding, which attend to
            nothing: their output is 0. A loss reads the last of them, which predicts the first token.
        padding: int or bool [B, S_kv], 0 at padding, which the kernel gets where padding is between tokens.
    """

    causal: bool | None = None
    cu_seqlens: Tensor | None = None
    longest: int | None = None
    window: int | None = None
    chunk: int | None = None
    length: int = 0
    keys: Keys | None = None
    unseeing: Tensor | None = None
    padding: Tensor | None = None

    @property
    def shape(self) -> tuple[int]:
        """What Transformers reads of a mask that a model passes to a model in it, which makes masks again (Molmo 2)."""
        return (self.length,)

    @property
    def ndim(self) -> int:
        """Not 2, which a padding mask has."""
        return len(self.shape)

    def of_document(self, length: int) -> Layout:
        """The mask of one document of `length` tokens alone."""
        return self._replace(cu_seqlens=None, longest=None, length=length, keys=None, unseeing=None, padding=None)

    def repeat(self, *sizes: int) -> Tensor:
        """Called by the pooling of Siglip 2, whose `nn.MultiheadAttention` needs a dense mask [B, 1, 1, S_kv]."""
        assert self.keys is not None, "a mask of cross attention"
        return self.keys.real[:, None, None].repeat(*sizes)

    def contiguous(self) -> Layout:
        """Called by `generate` on the masks for a static cache."""
        return self

    def arguments(self, query: Tensor, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a kernel's call with this mask; documents in `kwargs` come before its own."""
        batch, _, length, _ = query.shape
        found = dict(kwargs)
        if self.causal is not None:
            # Also of a module that calls itself not causal and gets causal masks, such as AIMv2's of text.
            found["is_causal"] = self.causal
        if self.causal is False or (self.window is not None and kwargs.get("sliding_window") is None):
            # Without causality, modules differ in the number that they pass for the same mask.
            found["sliding_window"] = self.window
        cu_seqlens, longest = kwargs.get("cu_seq_lens_q"), kwargs.get("max_length_q")
        if cu_seqlens is None:
            cu_seqlens, longest = self.cu_seqlens, self.longest
        if self.chunk is not None and (longest or length) > self.chunk:
            sizes = batch * length, self.chunk
            if cu_seqlens is None:
                cu_seqlens = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
                cu_seqlens = split_documents(cu_seqlens, *sizes)
            else:
                cu_seqlens = _splits.get(cu_seqlens, functools.partial(split_documents, cu_seqlens, *sizes), *sizes)
            longest = self.chunk
        if cu_seqlens is not None:
            found |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
            found |= {"max_length_q": longest, "max_length_k": longest}
        return found


def split_documents(cu_seqlens: Tensor, tokens: int, chunk: int) -> Tensor:
    """cu_seqlens [documents + 1] with a boundary at each multiple of `chunk` tokens in a document.

    The result has [documents + tokens // chunk + 1] elements, whatever the lengths; documents at its end may be empty.
    """
    token = torch.arange(tokens, device=cu_seqlens.device)
    document = document_of_tokens(cu_seqlens, 1, tokens, cu_seqlens.device)[0]
    is_start = (token - cu_seqlens.long()[document]) % chunk == 0
    size = len(cu_seqlens) - 1 + tokens // chunk
    # torch.compile makes the size that nonzero_static takes a constant.
    number = torch.arange(1, size + 2, device=cu_seqlens.device)
    return torch.searchsorted(is_start.cumsum(0), number).to(cu_seqlens.dtype)


_splits: TensorCache[Tensor] = TensorCache(4)
