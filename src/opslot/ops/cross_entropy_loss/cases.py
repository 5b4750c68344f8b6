"""Input cases of cross_entropy_loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opslot.slots import InputCase
from opslot.slots.random_inputs import on_device, randn


def _case(
    name: str,
    shape: tuple[int, ...],
    vocab: int,
    role: str = "check",
    *,
    ignored: float = 0.25,
    std: float = 1.0,
    strided: bool = False,
    exact: bool = False,
    shifted: bool = False,
    num_items: int | Tensor | None = None,
    bias: bool = False,
    **options: Any,
) -> InputCase:
    """`std` scales the standard deviation of the logits: from 12 on some labels have p near 1 or near 0.

    `exact` takes inputs in quarters, whose logits are exact in every dtype. A loss is one number, and rounding errors
    of eager code may cancel by chance, which would make its error too small a tolerance for a kernel.
    """

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        if role == "bench":
            generator = on_device(generator, device)
        *rows, width = shape
        hidden = randn((*rows, width * (2 if strided else 1)), dtype, device, generator)[..., :width]
        weight = randn((vocab, width), dtype, device, generator, scale=std * width**-0.5)
        if exact:
            hidden, weight = ((x * 4).round().clamp(-4, 4) / 4 for x in (hidden, weight))
        home = generator.device
        labels = torch.randint(vocab, rows, generator=generator, device=home)
        # Every other label is the likeliest token, as in a trained model.
        likeliest = (hidden.float() @ weight.float().t()).argmax(-1).to(home)
        labels = torch.where(torch.rand(rows, generator=generator, device=home) < 0.5, labels, likeliest)
        labels[torch.rand(rows, generator=generator, device=home) < ignored] = -100
        labels = labels.to(device)
        arguments: dict[str, Any] = {"hidden_states": hidden, "weight": weight, "labels": labels, **options}
        if num_items is not None:
            arguments["num_items_in_batch"] = num_items
        if bias:
            arguments["bias"] = randn((vocab,), dtype, device, generator)
        if shifted:
            arguments["shift_labels"] = labels
        return arguments

    return InputCase(name, make, role, {"hidden": shape[-1], "vocab": vocab})


_SHARED_CASES = [
    _case("odd vocabulary", (2, 17, 64), 131),
    _case("vocabulary in blocks", (1, 6, 32), 9001, ignored=0.0),
    _case("sure and unsure", (3, 11, 48), 96, std=15.0),
    _case("strided view", (2, 9, 40), 77, strided=True),
    _case("counted items", (2, 8, 32), 64, num_items=23),
    _case("counted items, tensor", (2, 8, 32), 64, num_items=torch.tensor(23)),
    _case("all ignored", (2, 5, 32), 50, ignored=1.1, num_items=7),
    _case("no rows", (0, 5, 32), 50, num_items=7),
    _case("smoothed", (2, 9, 32), 101, label_smoothing=0.1),
    _case("bias", (2, 9, 32), 101, bias=True),
]

CAUSAL_CASES = [
    *_SHARED_CASES,
    _case("shifted labels", (37, 32), 80, shifted=True),
    _case("capped and scaled", (2, 9, 32), 101, std=3.0, exact=True, softcap=5.0, logit_scale=0.5),
    _case("capped and scaled, bias", (2, 9, 32), 101, std=3.0, bias=True, softcap=5.0, logit_scale=0.5),
    _case(
        "capped, scaled and smoothed",
        (2, 9, 32),
        101,
        std=2.0,
        exact=True,
        softcap=30.0,
        logit_scale=3.0,
        label_smoothing=0.1,
    ),
    _case("8192x4096x151936", (1, 8192, 4096), 151936, "bench", ignored=0.0),
    _case("8192x2048x151936", (1, 8192, 2048), 151936, "bench", ignored=0.0),
    _case("8192x4096x128256", (1, 8192, 4096), 128256, "bench", ignored=0.0),
]

CLASSIFICATION_CASES = [
    *_SHARED_CASES,
    _case("rows only", (37, 32), 5),
    _case("16384x4096x32", (16384, 4096), 32, "bench", ignored=0.0),
]

TOKEN_CASES = [
    *(c for c in _SHARED_CASES if not c.name.startswith(("counted", "all", "no rows", "smoothed"))),
    _case("shifted labels", (37, 32), 80, shifted=True),
    _case("capped and scaled", (2, 9, 32), 101, std=3.0, exact=True, softcap=5.0, logit_scale=0.5),
    _case("all ignored", (2, 5, 32), 50, ignored=1.1),
    _case("no rows", (0, 5, 32), 50),
    _case("8192x4096x151936", (1, 8192, 4096), 151936, "bench", ignored=0.0),
]


def benchmark_case(shape: Mapping[str, int], tokens: int) -> InputCase:
    hidden, vocab = shape["hidden"], shape["vocab"]
    return _case(f"{tokens}x{hidden}x{vocab}", (1, tokens, hidden), vocab, "bench", ignored=0.0)
