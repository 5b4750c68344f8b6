"""Boundaries of packed documents, as Transformers' models take them."""

from __future__ import annotations

from typing import Any

import torch

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def offsets_of(starts: torch.Tensor) -> torch.Tensor:
    """Offsets [documents + 1] of documents that begin where `starts` is True, over its flattened elements."""
    return torch.nn.functional.pad(starts.flatten().nonzero().flatten(), (0, 1), value=starts.numel())


def boundaries_of(offsets: torch.Tensor) -> dict[str, Any]:
    """The keyword arguments of a forward for documents at `offsets` [documents + 1] of the flattened tokens."""
    cu_seqlens, longest = offsets.to(torch.int32), int(offsets.diff().max())
    return dict(zip(BOUNDARIES, (cu_seqlens, cu_seqlens, longest, longest), strict=True))
