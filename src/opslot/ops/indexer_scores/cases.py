"""Input cases of indexer_scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from opslot.slots import InputCase
from opslot.slots.random_inputs import randn


def _case(
    name: str,
    shape: tuple[int, int, int, int],
    keys: int | None = None,
    role: str = "check",
    *,
    causal: bool = False,
    document: int | None = None,
) -> InputCase:
    """Queries [B, S, H, D] and keys.

    Args:
        keys: how many, by default as many as queries.
        causal: queries see the keys before them, the last one all.
        document: tokens of each document.
    """
    batch, length, heads, width = shape
    total = keys or length

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "query": randn((batch, length, heads, width), dtype, device, generator),
            "key": randn((batch, total, width), dtype, device, generator),
            # Computed in float32 in a model of any dtype.
            "weights": randn((batch, length, heads), torch.promote_types(dtype, torch.float32), device, generator),
            "scale": width**-0.5,
        }
        if causal:
            end = torch.arange(total - length + 1, total + 1, device=device)
            start = torch.zeros_like(end) if document is None else (end - 1) // document * document
            arguments["visible"] = torch.stack([start, end])[:, None].to(torch.int32)
        return arguments

    return InputCase(name, make, role, {"heads": heads, "head_dim": width})


CASES = [
    _case("all keys", (2, 37, 4, 32)),
    _case("causal", (2, 70, 3, 32), causal=True),
    _case("documents", (1, 90, 2, 24), causal=True, document=40),
    _case("more keys than queries", (2, 9, 4, 64), 75, causal=True),
    _case("many keys, one query", (1, 1, 8, 128), 300),
    _case("compressed keys", (1, 50, 4, 32), 12),
    _case("no queries", (1, 0, 4, 32), 12),
    _case("8192, 64 heads, D=128, causal", (1, 8192, 64, 128), role="bench", causal=True),
    _case("4096 of 16384, 64 heads, D=128, causal", (1, 4096, 64, 128), 16384, role="bench", causal=True),
]


def _block_case(
    name: str, shape: tuple[int, int, int, int], size: int, document: int | None = None, role: str = "check"
) -> InputCase:
    """Blocks of `size` keys from the start of each document, of as many keys as queries [B, S, H, D]."""
    batch, length, heads, width = shape

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        token = torch.arange(length, device=device)
        documents = range(0, length, document or max(1, length))
        bounds = [
            (first, min(first + size, start + (document or length), length))
            for start in documents
            for first in range(start, min(start + (document or length), length), size)
        ]
        visible = torch.stack([token // document * document if document else token * 0, token + 1])
        return {
            "query": randn((batch, length, heads, width), dtype, device, generator),
            "key": randn((batch, length, width), dtype, device, generator),
            "blocks": torch.tensor(bounds, dtype=torch.int32, device=device).view(-1, 2).T[:, None],
            "visible": visible[:, None].to(torch.int32),
        }

    return InputCase(name, make, role, {"heads": heads, "head_dim": width})


BLOCK_CASES = [
    _block_case("causal", (2, 70, 3, 32), 16),
    _block_case("documents", (1, 90, 2, 24), 16, document=40),
    _block_case("blocks of several tiles", (1, 150, 2, 32), 128),
    _block_case("one query", (2, 1, 4, 64), 8),
    _block_case("no queries", (1, 0, 4, 32), 8),
    _block_case("8192, 4 heads, D=128, blocks of 128", (1, 8192, 4, 128), 128, role="bench"),
]


def benchmark_case(shape: Mapping[str, int], tokens: int) -> InputCase:
    heads, width = shape["heads"], shape["head_dim"]
    length = min(tokens, 4096)
    return _case(
        f"{length} of {tokens}, {heads} heads, D={width}", (1, length, heads, width), tokens, "bench", causal=True
    )
