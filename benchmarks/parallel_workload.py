"""What the benchmarks of several GPUs train: models, how they are spread, and how a step is timed.

Knows no trainer, so that a peer's process imports it beside its own Transformers.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 151936
WARM_UP = 3
LEARNING_RATE = 1e-5
MAX_NORM = 1.0

_SHARED = {
    "vocab_size": VOCABULARY,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
_MODELS = {
    "dense": (
        "qwen3",
        "Qwen3ForCausalLM",
        {"hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 8},
    ),
    "moe": (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.001,
        },
    ),
}


@dataclass(frozen=True)
class Configuration:
    """A model, how it is spread, and what a step of one data-parallel rank holds.

    Attributes:
        sp, ep: sizes of the axes; 0 stands for all processes.
        rows, length: tokens of a step, for the ranks that share a sequence together.
    """

    model: str
    sp: int = 1
    ep: int = 1
    rows: int = 2
    length: int = 8192

    def sizes(self) -> tuple[int, int]:
        return self.sp or world_size(), self.ep or world_size()


CONFIGURATIONS = {
    "dense-fsdp": Configuration("dense"),
    "moe-fsdp": Configuration("moe"),
    "moe-ep": Configuration("moe", ep=0),
    "dense-sp": Configuration("dense", sp=0, rows=1, length=32768),
    "moe-ep-sp": Configuration("moe", sp=0, ep=0, rows=1, length=32768),
}


def model_config(name: str, layers: int, shrink: int = 1) -> Any:
    """A Transformers config of the model; widths divided by `shrink`, for a dry run on a CPU."""
    architecture, head_model, sizes = _MODELS[name]
    config = {**_SHARED, **sizes, "num_hidden_layers": layers, "architectures": [head_model]}
    for width in ("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "head_dim"):
        if width in config:
            config[width] //= shrink
    return CONFIG_MAPPING[architecture](**config)


def token_ids(configuration: Configuration, vocabulary: int, dp_rank: int, shrink: int = 1) -> torch.Tensor:
    """Random tokens [rows, length], the same for the ranks that share a sequence."""
    generator = torch.Generator().manual_seed(dp_rank)
    return torch.randint(vocabulary, (configuration.rows, configuration.length // shrink), generator=generator)


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def free_memory() -> None:
    """Give a finished configuration's memory back; models hold themselves in cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(step: Callable[[], torch.Tensor], tokens: int, steps: int, device: torch.device) -> dict[str, Any]:
    """Time `step`, which trains once on all ranks and returns this rank's share of the loss.

    As training runs: the host goes ahead and nothing waits between steps; events say when each was done. The median
    over `steps` after warm-up; the slowest rank's counts.

    Args:
        tokens: of one step, over all ranks.
    """
    losses = [step() for _ in range(WARM_UP)]
    seconds = _time_steps(step, steps, losses, device)
    slowest = torch.tensor([statistics.median(seconds), _peak_gib(device)], dtype=torch.float64, device=device)
    whole = torch.stack([loss.detach().float() for loss in losses])
    if dist.is_initialized():
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(whole)
    typical, gib = slowest.tolist()
    return {
        "tokens_per_s_per_gpu": round(tokens / typical / world_size()),
        "gib": round(gib, 1),
        "ms": round(1000 * typical, 1),
        "losses": [round(value, 4) for value in whole.tolist()],
    }


def _time_steps(
    step: Callable[[], torch.Tensor], steps: int, losses: list[torch.Tensor], device: torch.device
) -> list[float]:
    if device.type != "cuda":
        import time

        marks = [time.perf_counter()]
        for _ in range(steps):
            losses.append(step())
            marks.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(marks)]
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        losses.append(step())
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(events)]


def _peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0


def profile(step: Callable[[], torch.Tensor], rows: int = 25) -> str:
    """What one step does on this rank's GPU: how long it computes, communicates, both or neither, and its kernels."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    communicating = covered([(a, b) for name, a, b in spans if name.startswith("nccl")])
    computing = covered([(a, b) for name, a, b in spans if not name.startswith("nccl")])
    busy = covered([(a, b) for _, a, b in spans])
    whole = max(b for _, _, b in spans) - min(a for _, a, _ in spans)
    summary = (
        f"step {whole / 1e3:.1f} ms: computing {computing / 1e3:.1f}, communicating {communicating / 1e3:.1f}, "
        f"of which nothing else ran for {(busy - computing) / 1e3:.1f}; idle {(whole - busy) / 1e3:.1f}"
    )
    table = trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=rows, max_name_column_width=60)
    return f"{summary}\n{table}"


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def record(file: str | None, name: str, configuration: Configuration, result: dict[str, Any]) -> None:
    """Print a result, and add it to `file`, which is complete after every configuration. For the first rank."""
    print(f"{name:12} {json.dumps(result)}", flush=True)
    if file is None:
        return
    results: dict[str, Any] = {}
    if os.path.exists(file):
        with open(file) as handle:
            results = json.load(handle)
    versions = {package: version(package) for package in ("torch", "transformers", "triton")}
    results.setdefault(
        "machine", {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", **versions}
    )
    results[name] = {**asdict(configuration), "world_size": world_size(), **result}
    with open(file, "w") as handle:
        json.dump(results, handle, indent=1)
