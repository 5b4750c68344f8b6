"""Input cases of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opslot.slots import InputCase
from opslot.slots.random_inputs import randn


class _Module(nn.Module):
    """Attention module for input cases."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.is_causal = causal


def _case(
    name: str,
    shape: tuple[int, int, int, int, int],
    documents: list[int] | None = None,
    role: str = "check",
    causal: bool = True,
    value_width: int | None = None,
    sinks: bool = False,
    keys: int | None = None,
    **options: Any,
) -> InputCase:
    batch, heads, kv_heads, length, width = shape

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        # [B, S, heads, D] in memory, as projections return it.
        def projected(count: int, size: int = width, tokens: int = length) -> Tensor:
            return randn((batch, tokens, count, size), dtype, device, generator).transpose(1, 2)

        arguments: dict[str, Any] = {
            "module": _Module(causal),
            "query": projected(heads),
            "key": projected(kv_heads, tokens=keys or length),
            "value": projected(kv_heads, value_width or width, keys or length),
            "attention_mask": None,
            "scaling": width**-0.5,
            **options,
        }
        if sinks:
            arguments["s_aux"] = randn((heads,), dtype, device, generator)
        if documents is not None:
            cu_seqlens = torch.tensor([0, *documents], device=device).cumsum(0).to(torch.int32)
            longest = max(documents)
            arguments |= {
                "cu_seq_lens_q": cu_seqlens,
                "cu_seq_lens_k": cu_seqlens,
                "max_length_q": longest,
                "max_length_k": longest,
            }
        return arguments

    return InputCase(name, make, role, {"heads": heads, "kv_heads": kv_heads, "head_dim": width})


# Unequal, as in packed sequences.
_DOCUMENTS = [2816, 1536, 1280, 1152, 1088, 1024, 1024, 1000, 960, 896, 832, 768, 704, 600, 448, 256]

CASES = {
    "causal": [
        _case("grouped heads", (2, 4, 2, 33, 32)),
        _case("one group", (1, 2, 2, 17, 64)),
        _case("two tokens", (2, 4, 1, 2, 32)),
        _case("packed documents", (1, 4, 2, 50, 32), documents=[7, 1, 30, 12]),
        _case("packed documents, two rows", (2, 4, 2, 20, 32), documents=[12, 8, 5, 15]),
        _case("sliding window", (2, 4, 2, 50, 32), sliding_window=9),
        _case("packed documents, sliding window", (1, 4, 2, 50, 32), documents=[7, 1, 30, 12], sliding_window=9),
        _case("softcap", (1, 4, 2, 40, 32), softcap=2.0),
        _case("sinks", (1, 4, 2, 40, 32), sinks=True),
        _case("documents, sinks, sliding window", (1, 4, 2, 50, 32), [7, 1, 30, 12], sinks=True, sliding_window=9),
        _case("unequal head sizes (MLA)", (1, 4, 4, 40, 48), value_width=32),
        _case("unequal head sizes, grouped heads, sinks", (1, 4, 2, 40, 192), value_width=128, sinks=True),
        _case("padded head size", (1, 4, 2, 40, 40)),
        _case("2 x 8192, 32/8 heads, D=128", (2, 32, 8, 8192, 128), role="bench"),
        _case("16 x 1024, 32/8 heads, D=128", (16, 32, 8, 1024, 128), role="bench"),
        _case("16384 in 16 documents, 32/8 heads, D=128", (1, 32, 8, 16384, 128), _DOCUMENTS, role="bench"),
        _case("2 x 8192, 32/8 heads, D=64", (2, 32, 8, 8192, 64), role="bench"),
    ],
    "bidirectional": [
        _case("bidirectional", (2, 4, 4, 21, 64), causal=False),
        _case("bidirectional packed documents", (1, 4, 4, 40, 64), documents=[16, 4, 20], causal=False),
        _case("cross", (2, 4, 4, 9, 64), causal=False, keys=21),
    ],
}


def benchmark_case(shape: Mapping[str, int], tokens: int) -> InputCase:
    heads, kv_heads, width = shape["heads"], shape["kv_heads"], shape["head_dim"]
    # One row up to the usual packed length.
    length = min(tokens, 8192)
    name = f"B={tokens // length} S={length} {heads}/{kv_heads} heads D={width}"
    return _case(name, (tokens // length, heads, kv_heads, length, width), role="bench")
