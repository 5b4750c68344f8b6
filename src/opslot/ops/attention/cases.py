"""Input cases of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opslot.ops.attention.reference import pack_bits
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
    top: int | None = None,
    heads_apart: bool = False,
    **options: Any,
) -> InputCase:
    """Self-attention, or to other `keys`.

    Args:
        top: how many earlier keys each query sees at most, given as bits.
        heads_apart: key/value heads see other keys.
    """
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
        if top is not None:
            bits = _earlier_keys(length, top, device).expand(batch, -1, -1)
            if heads_apart:
                others = [
                    _earlier_keys(length, top, device, 7 * head).expand(batch, -1, -1) for head in range(kv_heads)
                ]
                bits = torch.stack(others, 1)
            arguments["selected_bits"] = bits
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


def _earlier_keys(length: int, top: int, device: torch.device, shift: int = 0) -> Tensor:
    """Bits [1, S, ceil(S / 32)] of `top` keys up to each query, other ones for each: its own, and some in two areas.

    Args:
        shift: of the keys in the second area.
    """
    token = torch.arange(length, device=device)[:, None]
    mask = torch.zeros(length, length + 1, dtype=torch.bool, device=device)
    place = torch.arange(top, device=device)
    key = torch.where(place % 2 == 0, token - place // 2 * 3, (token // 64 * 7 + place // 2 * 5 + shift) % length)
    mask.scatter_(1, key.where((key >= 0) & (key <= token), length), True)
    return pack_bits(mask[None, :, :-1])


def _compressed_case(
    name: str,
    shape: tuple[int, int, int, int],
    rate: int | None = None,
    top: int | None = None,
    role: str = "check",
    padding: tuple[int, ...] = (),
    first: int = 0,
    **options: Any,
) -> InputCase:
    """Keys of `rate` tokens each beside those of a window, all earlier ones or `top` of them.

    Args:
        padding: tokens at the start of each row that are padding.
        first: the token of the first query; there are keys of the tokens before it.
    """
    batch, heads, length, width = shape
    keys = 0 if rate is None else length // rate

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "module": _Module(causal=True),
            "query": randn((batch, length - first, heads, width), dtype, device, generator).transpose(1, 2),
            "key": randn((batch, 1, length + keys, width), dtype, device, generator),
            "value": None,
            "attention_mask": None,
            "scaling": width**-0.5,
            "s_aux": randn((heads,), dtype, device, generator),
            **options,
        }
        token = torch.arange(length, device=device)
        if rate is not None:
            seen = ((token + 1) // rate).expand(batch, -1)
            arguments |= {"compressed_keys": keys, "selected": seen}
            if top is not None:
                # Others for each query, none twice.
                entry = (torch.arange(keys, device=device) + 7 * token[:, None]) % max(keys, 1)
                entry = entry.where(entry < seen[..., None], -1)[..., :top]
                arguments["selected"] = entry
            arguments["selected"] = arguments["selected"][:, first:]
        if padding:
            starts = torch.tensor(padding, device=device)
            arguments["attention_mask"] = token >= starts[:, None]
        return arguments

    return InputCase(name, make, role, {"heads": heads, "head_dim": width})


# Unequal, as in packed sequences.
_DOCUMENTS = [2816, 1536, 1280, 1152, 1088, 1024, 1024, 1000, 960, 896, 832, 768, 704, 600, 448, 256]

CASES = {
    "causal": [
        _case("grouped heads", (2, 4, 2, 33, 32)),
        _case("one group", (1, 2, 2, 17, 64)),
        _case("two tokens", (2, 4, 1, 2, 32)),
        _case("packed documents", (1, 4, 2, 50, 32), documents=[7, 1, 30, 12]),
        # As padding in compiled models.
        _case("packed documents, some empty", (2, 4, 2, 40, 32), documents=[0, 40, 0, 0, 7, 1, 0, 32, 0]),
        _case("packed documents, two rows", (2, 4, 2, 20, 32), documents=[12, 8, 5, 15]),
        _case("sliding window", (2, 4, 2, 50, 32), sliding_window=9),
        _case("packed documents, sliding window", (1, 4, 2, 50, 32), documents=[7, 1, 30, 12], sliding_window=9),
        _case("softcap", (1, 4, 2, 40, 32), softcap=2.0),
        _case("sinks", (1, 4, 2, 40, 32), sinks=True),
        _case("documents, sinks, sliding window", (1, 4, 2, 50, 32), [7, 1, 30, 12], sinks=True, sliding_window=9),
        _case("unequal head sizes (MLA)", (1, 4, 4, 40, 48), value_width=32),
        _case("unequal head sizes, grouped heads, sinks", (1, 4, 2, 40, 192), value_width=128, sinks=True),
        _case("padded head size", (1, 4, 2, 40, 40)),
        _case("documents, softcap", (1, 4, 2, 50, 32), documents=[7, 1, 30, 12], softcap=2.0),
        _case("head size 512", (2, 4, 2, 40, 512)),
        _case("head size 320, documents, sliding window", (1, 4, 1, 50, 320), [7, 1, 30, 12], sliding_window=9),
        _case("2 x 8192, 32/8 heads, D=128", (2, 32, 8, 8192, 128), role="bench"),
        _case("16 x 1024, 32/8 heads, D=128", (16, 32, 8, 1024, 128), role="bench"),
        _case("16384 in 16 documents, 32/8 heads, D=128", (1, 32, 8, 16384, 128), _DOCUMENTS, role="bench"),
        _case("2 x 8192, 32/8 heads, D=64", (2, 32, 8, 8192, 64), role="bench"),
        _case("8192, 16/2 heads, D=512", (1, 16, 2, 8192, 512), role="bench"),
        # Layers of gpt-oss, Gemma 3, Gemma 2, Qwen3.5 and DeepSeek-V3.
        _case("4096, 64/8 heads, D=64, sinks", (1, 64, 8, 4096, 64), role="bench", sinks=True),
        _case(
            "4096, 64/8 heads, D=64, sinks, window", (1, 64, 8, 4096, 64), None, "bench", sinks=True, sliding_window=128
        ),
        _case("8192, 16/8 heads, D=256, window", (1, 16, 8, 8192, 256), role="bench", sliding_window=1024),
        _case("8192, 16/8 heads, D=256, softcap", (1, 16, 8, 8192, 256), role="bench", softcap=50.0),
        _case("8192, 16/4 heads, D=256", (1, 16, 4, 8192, 256), role="bench"),
        _case("8192, 16 heads, D=192/128", (1, 16, 16, 8192, 192), role="bench", value_width=128),
    ],
    "compressed": [
        _compressed_case("a window and selected keys", (2, 4, 21, 32), rate=4, top=3, sliding_window=9),
        _compressed_case("a window and all earlier keys", (1, 4, 30, 32), rate=8, sliding_window=9),
        _compressed_case("more heads than a tile of them", (1, 36, 13, 64), rate=4, top=3, sliding_window=4),
        _compressed_case("a window", (2, 3, 20, 24), sliding_window=9),
        _compressed_case("few of many, padding", (2, 4, 22, 32), rate=2, top=3, sliding_window=9, padding=(0, 7)),
        _compressed_case("fewer tokens than a key has", (1, 4, 3, 32), rate=4, top=3, sliding_window=9),
        _compressed_case("queries after the first, selected keys", (1, 4, 23, 32), 3, 2, sliding_window=6, first=16),
        _compressed_case("queries after the first, all earlier keys", (1, 4, 23, 32), 4, sliding_window=6, first=17),
        _compressed_case(
            "4096, 64 heads, D=512, 512 of 1024", (1, 64, 4096, 512), 4, 512, role="bench", sliding_window=128
        ),
        _compressed_case("4096, 64 heads, D=512, 32 keys", (1, 64, 4096, 512), 128, role="bench", sliding_window=128),
        _compressed_case(
            "16384, 64 heads, D=512, 512 of 4096", (1, 64, 16384, 512), 4, 512, role="bench", sliding_window=128
        ),
    ],
    "indexed": [
        _case("keys of each query", (2, 4, 4, 70, 48), value_width=32, top=9),
        _case("keys of each query, sinks, whole tiles", (1, 4, 4, 64, 32), top=5, sinks=True),
        _case("keys of each query, grouped heads", (1, 6, 2, 40, 32), top=3),
        _case("keys of each query, four heads in a group", (2, 8, 2, 70, 48), top=9),
        _case("keys of each key/value head", (2, 8, 2, 75, 32), top=5, heads_apart=True),
        _case("keys of each key/value head, large groups", (1, 128, 2, 40, 16), top=3, heads_apart=True),
        _case("keys of each key/value head, six heads in a group", (1, 12, 2, 40, 32), top=3, heads_apart=True),
        _case("keys of each query, two tiles of a head", (1, 2, 2, 130, 192), value_width=128, top=12),
        _case("all earlier keys", (1, 4, 4, 40, 48), value_width=32),
        _case(
            "8192, 128 heads, D=192/128, top 2048", (1, 128, 128, 8192, 192), None, "bench", value_width=128, top=2048
        ),
        _case("8192, 16/2 heads, D=256, top 2048", (1, 16, 2, 8192, 256), None, "bench", top=2048),
        _case("8192, 64/4 heads, top 2048 each", (1, 64, 4, 8192, 128), None, "bench", top=2048, heads_apart=True),
    ],
    "bidirectional": [
        _case("bidirectional", (2, 4, 4, 21, 64), causal=False),
        _case("bidirectional packed documents", (1, 4, 4, 40, 64), documents=[16, 4, 20], causal=False),
        _case("bidirectional documents, some empty", (2, 4, 4, 40, 64), [0, 40, 0, 0, 7, 1, 0, 32, 0], causal=False),
        _case("cross", (2, 4, 4, 9, 64), causal=False, keys=21),
        _case("bidirectional, window", (2, 4, 2, 50, 64), causal=False, sliding_window=9),
        _case("bidirectional, documents, window", (1, 4, 4, 50, 64), [7, 1, 30, 12], causal=False, sliding_window=9),
        # Four images of 1024 x 1024 in Qwen3-VL's tower.
        _case("16384 in 4 images, 16 heads, D=72", (1, 16, 16, 16384, 72), [4096] * 4, "bench", causal=False),
        _case("8192, 12 heads, D=64, window", (1, 12, 12, 8192, 64), None, "bench", causal=False, sliding_window=65),
    ],
}


def benchmark_case(shape: Mapping[str, int], tokens: int) -> InputCase:
    heads, kv_heads, width = shape["heads"], shape["kv_heads"], shape["head_dim"]
    # One row up to the usual packed length.
    length = min(tokens, 8192)
    name = f"B={tokens // length} S={length} {heads}/{kv_heads} heads D={width}"
    return _case(name, (tokens // length, heads, kv_heads, length, width), role="bench")
