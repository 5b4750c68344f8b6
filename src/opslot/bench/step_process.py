"""One contender of a comparison of training steps: `python -m opslot.bench.step_process FILE`.

The file says what to build and how long to train, as JSON; the result is written beside it. A process of its own keeps
one contender's patches, allocator and compiled code from another.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opslot.bench import draw_weights, measure_steps
from opslot.bench.baselines import BASELINES
from opslot.bench.steps import OWN


def main(argv: list[str]) -> int:
    """Measure what the file asks for; the exit code is 0 unless the contender raised."""
    place = Path(argv[0])
    task = json.loads(place.read_text())
    device = torch.device(task["device"])
    dtype = getattr(torch, task["dtype"])
    model, optimizer_class, kernels = _build(task, dtype)
    draw_weights(model, 0, task["model"].get("initializer_range", 0.02))
    optimizer = optimizer_class(model.parameters(), lr=task["lr"], betas=(0.9, 0.95), weight_decay=0.0)
    batch_at = _batches(task, device)
    result = measure_steps(model, optimizer, batch_at, task["steps"], device)
    if task["trace"]:
        result["trace"] = _trace(model, optimizer, batch_at(0))
    place.with_suffix(".result").write_text(json.dumps({**result, "kernels": kernels}))
    return 0


def _build(task: dict[str, Any], dtype: torch.dtype) -> tuple[nn.Module, Callable[..., torch.optim.Optimizer], str]:
    """The model, its optimizer's class, and opslot's table of kernels."""
    name = task["contender"]
    if name in OWN:
        return _build_own(task, OWN[name] or task["ops"], dtype)
    fused = functools.partial(torch.optim.AdamW, fused=True)
    for peer in BASELINES.values():
        for contender, options in peer.contenders:
            if contender == name:
                return peer.load().build(task["model"], dtype, task["device"], **dict(options)), fused, ""
    raise ValueError(f"no contender {name!r}")


def _build_own(
    task: dict[str, Any], ops: dict[str, str], dtype: torch.dtype
) -> tuple[nn.Module, Callable[..., torch.optim.Optimizer], str]:
    from transformers import AutoConfig

    import opslot
    from opslot.optim.selection import adamw_of

    config = AutoConfig.for_model(**task["model"])
    model = opslot.build_foundation_model(config, torch_dtype=dtype, init_device=task["device"], ops_implementation=ops)
    return model, adamw_of(model), str(opslot.explain(model))


def _batches(task: dict[str, Any], device: torch.device) -> Callable[[int], Tensor]:
    """The same random tokens in every step, or the batches of a text."""
    shape = task["batch"], task["length"]
    if task["text"]:
        import numpy

        tokens = numpy.load(task["text"], mmap_mode="r")
        return lambda step: torch.from_numpy(tokens[step % len(tokens)].astype("int64")).to(device)
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randint(0, task["model"]["vocab_size"], shape, device=device, generator=generator)
    return lambda step: ids


def _trace(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> str:
    """One more step under torch's profiler, as its table."""
    kind = "cuda" if ids.device.type == "cuda" else "cpu"
    with torch.profiler.profile() as trace:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        if kind == "cuda":
            torch.cuda.synchronize()
    return trace.key_averages().table(sort_by=f"self_{kind}_time_total", row_limit=30, max_name_column_width=70)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
