"""One implementation of a comparison of training steps: `python -m opslot.bench.step_process FILE...`.

Each file holds what to build and how long to train, as JSON; the result is written beside it. A separate
process keeps the patches, the allocator and the compiled code of one implementation from another.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import statistics
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opslot._base.files import write_text
from opslot.bench.baselines import BASELINES, baseline_of
from opslot.bench.step import EAGER, OWN_IMPLEMENTATIONS, WARM_UP
from opslot.bench.step_inputs import Batch, config_of, media_batch, model_vocab_size, packed, text_batch
from opslot.bench.timing import mark, median_cpu
from opslot.slots.protocol import trained_model

# torch.compile wraps a model in a module, and releases of Transformers differ in those around a language model.
_WRAPPERS = ("_orig_mod", "model", "language_model")
# Names of the encoders in Transformers' models.
_TOWERS = {
    "vision": ("visual", "vision_tower", "vision_model"),
    "audio": ("audio_tower", "audio_model", "audio_encoder"),
}


def main(argv: list[str]) -> int:
    """Measure what each file describes; ends at the first one whose implementation raises."""
    for path in map(Path, argv):
        # Complete once it exists: the parent waits for it.
        write_text(path.with_suffix(".result"), json.dumps(_measure(json.loads(path.read_text()))))
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()
    return 0


def _measure(task: dict[str, Any]) -> dict[str, Any]:
    device = torch.device(task["device"])
    dtype = getattr(torch, task["dtype"])
    model, optimizer_class, kernels = _build(task, dtype)
    draw_weights(trained_model(model), task["model"].get("initializer_range", 0.02))
    optimizer = optimizer_class(model.parameters(), lr=task["lr"], betas=(0.9, 0.95), weight_decay=0.0)
    batch_at = _batches(task, dtype, device, model)
    result = measure_steps(model, optimizer, batch_at, task["steps"], device)
    if task["implementation"].endswith("CUDA graphs"):
        # The allocator counts the memory pool of a CUDA graph as reserved, not as allocated.
        torch.cuda.empty_cache()
        result["peak_gib"] = torch.cuda.memory_reserved() / 2**30
    if task["trace"]:
        result["trace"] = _trace(model, optimizer, batch_at(0), device.type)
    return {**result, "kernels": kernels}


def _build(task: dict[str, Any], dtype: torch.dtype) -> tuple[nn.Module, Callable[..., torch.optim.Optimizer], str]:
    """The model, its optimizer's class, and opslot's table of kernels."""
    name = task["implementation"]
    if name not in OWN_IMPLEMENTATIONS:
        baseline = BASELINES[baseline_of(name)]
        model = baseline.load().build(task["model"], dtype, task["device"], **baseline.models[name])
        return model, functools.partial(torch.optim.AdamW, fused=True), ""
    import opslot
    from opslot.models._multimodal.host_inputs import keep_inputs_on_host
    from opslot.optim.selection import adamw_of

    added = OWN_IMPLEMENTATIONS[name]
    ops = EAGER if added is None else {**task["ops_implementation"], **added}
    config = config_of(task["model"])
    model = opslot.build_foundation_model(config, torch_dtype=dtype, init_device=task["device"], ops_implementation=ops)
    keep_inputs_on_host(model)
    optimizer, kernels = adamw_of(model), str(opslot.explain(model))
    if name.endswith("torch.compile"):
        model.compile()
    elif name.endswith("layers as CUDA graphs"):
        model = opslot.parallelize(model, cuda_graphs=True)
    elif name.endswith("CUDA graphs"):
        model.compile(mode="reduce-overhead")
    elif name.endswith("compiled layers"):
        model = opslot.parallelize(model, compile=True)
    return model, optimizer, kernels


@torch.no_grad()
def draw_weights(model: nn.Module, std: float) -> None:
    """Give every parameter values that depend on its name alone, so that every implementation starts alike.

    Vectors named "weight" are norms' and become 1, biases 0, all others normal with `std`.
    """
    for name, parameter in model.named_parameters():
        draw_weight(name, parameter, std)


def draw_weight(name: str, weight: Tensor, std: float) -> None:
    """The values of `draw_weights`, written into a tensor that does not require a gradient."""
    if weight.ndim == 1:
        weight.fill_(1.0 if name.endswith("weight") else 0.0)
    else:
        own = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        generator = torch.Generator(weight.device).manual_seed(zlib.crc32(own.encode()))
        weight.normal_(0.0, std, generator=generator)


def measure_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch_at: Callable[[int], Batch],
    steps: int,
    device: torch.device,
) -> dict[str, Any]:
    """Train for `WARM_UP` steps and `steps` more.

    Args:
        batch_at: inputs of a step, counted from 0.

    Returns:
        ms: median of the steps after the warm-up. On a GPU the host runs ahead, as it does in training, and events
            mark the end of each step.
        tokens_per_s: at that time.
        peak_gib: at the peak of the steps after the warm-up; None off CUDA.
        vision_ms, audio_ms: median time of the vision and of the audio tower, forward and backward; None without one.
        losses: of every step.
    """
    losses: list[Tensor] = []
    towers = {f"{kind}_ms": TowerTimes(model, names, device) for kind, names in _TOWERS.items()}

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        loss = model(**batch_at(len(losses)), use_cache=False).loss
        # A CUDA graph overwrites its outputs in the next step.
        losses.append(loss.detach().clone())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM_UP):
        step()
    ms, peak = _time_cuda(step, steps) if device.type == "cuda" else (median_cpu(step, steps), None)
    values = torch.stack([x.float() for x in losses]).tolist()
    tokens = batch_at(0)["input_ids"].numel()
    found = {"ms": ms, "tokens_per_s": tokens / ms * 1e3, "peak_gib": peak, "losses": values}
    return found | {name: times.median(steps) for name, times in towers.items()}


class TowerTimes:
    """Marks when an encoder begins and ends, in forward and in backward.

    Args:
        names: last names of the module; a model without such a module has no times.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...], device: torch.device) -> None:
        self._marks: list[list[Any]] = [[], [], [], []]
        self._on_cuda = device.type == "cuda"
        tower = next((module for name, module in model.named_modules() if name.rpartition(".")[2] in names), None)
        if tower is None:
            return
        tower.register_forward_pre_hook(lambda *_: self._mark(0))
        tower.register_forward_hook(self._end_of_forward)
        # The patch embedding or the first convolution comes first, so its gradient comes last.
        next(tower.parameters()).register_post_accumulate_grad_hook(lambda _: self._mark(3))

    def _mark(self, which: int) -> None:
        if torch.compiler.is_compiling():
            return
        self._marks[which].append(mark(self._on_cuda))

    def _end_of_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._mark(1)
        # Encoders return the features as the pooled output, or as the last hidden state alone.
        features = output if isinstance(output, Tensor) else getattr(output, "pooler_output", None)
        features = output[0] if features is None else features
        features.register_hook(lambda grad: self._mark(2))

    def median(self, steps: int) -> float | None:
        """Of the last `steps` steps; None for a model that is compiled whole, whose graph has no marks."""
        if len({*map(len, self._marks)}) > 1:
            return None
        times = [a.elapsed_time(b) + c.elapsed_time(d) for a, b, c, d in zip(*self._marks, strict=True)]
        return statistics.median(times[-steps:]) if times else None


def _time_cuda(step: Callable[[], None], steps: int) -> tuple[float, float]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for event in marks[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    ms = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    return ms, torch.cuda.max_memory_allocated() / 2**30


def _batches(
    task: dict[str, Any], dtype: torch.dtype, device: torch.device, model: nn.Module
) -> Callable[[int], Batch]:
    """The same random tokens, images and audio in every step, or the batches of a text."""
    own = task["implementation"] in OWN_IMPLEMENTATIONS
    prepare = None if own else getattr(BASELINES[baseline_of(task["implementation"])].load(), "prepare", None)
    if task["text"]:
        import numpy

        tokens = numpy.load(task["text"], mmap_mode="r")
        return lambda step: text_batch(torch.from_numpy(tokens[step % len(tokens)].astype("int64")).to(device))
    shape = task["batch"], task["length"]
    if task["image_size"] or task["audio_seconds"]:
        batch = media_batch(task["model"], *shape, task["image_size"], task["audio_seconds"], dtype)
        batch = packed(batch, task["model"]) if own else batch
    else:
        generator = torch.Generator(device).manual_seed(1)
        vocabulary = model_vocab_size(task["model"])
        batch = text_batch(torch.randint(0, vocabulary, shape, device=device, generator=generator))
        if own:
            batch["position_ids"] = torch.arange(task["length"]).expand(shape)
    batch = prepare(batch, task["model"], model) if prepare else batch
    # For opslot as its trainers do: media are packed, and integers besides tokens of text on the host.
    batch = {
        name: x.to(device) if isinstance(x, Tensor) and (not own or x.is_floating_point()) else x
        for name, x in batch.items()
    }
    return lambda step: batch


def _trace(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, kind: str) -> str:
    """One more step under torch.profiler, as its table."""
    with torch.profiler.profile() as trace:
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        if kind == "cuda":
            torch.cuda.synchronize()
    return trace.key_averages().table(sort_by=f"self_{kind}_time_total", row_limit=30, max_name_column_width=70)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
