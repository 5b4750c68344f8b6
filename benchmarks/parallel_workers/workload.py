"""What the workers of `benchmarks/parallel.py` train: models, how they are parallelized, and how a step is timed.

Imports no baseline and of opslot only what a baseline's process imports beside its own Transformers.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from opslot.bench.step_process import draw_weight

WARM_UP = 3
LEARNING_RATE = 1e-5
MAX_NORM = 1.0

MODELS = {
    "dense": "qwen3_8b_width",
    "moe": "qwen3_30b_a3b_width",
    "gpt_oss": "gpt_oss_20b_width",
    "qwen3_5_moe": "qwen3.5_35b_a3b_width",
    "vl": "qwen3_vl_8b_width",
    "small": "qwen3_0.6b",
}
# Frames of a video and the tokens of its timestamps between them.
FRAME_SIDE, TIMESTAMP = 1024, 8


@dataclass(frozen=True)
class Configuration:
    """A model, how it is parallelized, and the batch of one data-parallel rank.

    Attributes:
        model: key of `MODELS`.
        sp, ep: sizes of the mesh axes; 0 stands for all processes.
        batch, length: samples, and tokens of a global sequence.
        frames: frames of one video that are the sample, two for each row of its grid; 0 for text.
        data_parallel_mode: of opslot; other libraries shard parameters.
    """

    model: str
    sp: int = 1
    ep: int = 1
    batch: int = 2
    length: int = 8192
    frames: int = 0
    data_parallel_mode: str = "fsdp2"

    def sizes(self) -> tuple[int, int]:
        return self.sp or world_size(), self.ep or world_size()

    def setup(self) -> str:
        """How it is parallelized, e.g. "fsdp 4, ep 4"; "dp 4" where libraries may replicate parameters."""
        sp, ep = self.sizes()
        data = "fsdp" if self.data_parallel_mode == "fsdp2" else "dp"
        axes = {data: world_size() if sp == 1 else 1, "ep": ep, "sp": sp}
        parts = [f"{name} {size}" for name, size in axes.items() if size > 1]
        return ", ".join([*parts, "video, checkpointing full"] if self.frames else parts)


CONFIGURATIONS = {
    "dense-fsdp": Configuration("dense"),
    "moe-fsdp": Configuration("moe"),
    "moe-ep": Configuration("moe", ep=0),
    "dense-sp": Configuration("dense", sp=0, batch=1, length=32768),
    "moe-ep-sp": Configuration("moe", sp=0, ep=0, batch=1, length=32768),
    "gpt_oss-ep": Configuration("gpt_oss", ep=0),
    "gpt_oss-ep-sp": Configuration("gpt_oss", sp=0, ep=0, batch=1, length=32768),
    "qwen3_5_moe-ep": Configuration("qwen3_5_moe", ep=0),
    "qwen3_5_moe-ep-sp": Configuration("qwen3_5_moe", sp=0, ep=0, batch=1, length=32768),
    "small-dp": Configuration("small", batch=4, length=2048, data_parallel_mode="auto"),
    "vl-video-sp": Configuration("vl", sp=0, batch=1, length=64 * (1024 + TIMESTAMP), frames=128),
}


def model_config(name: str, layers: int | None = None, shrink: int = 1) -> Any:
    """A Transformers config of the model, with as many layers as its file says or `layers`.

    Widths are divided by `shrink`, for a dry run on a CPU.
    """
    file = Path(__file__).parents[1] / "models" / f"{MODELS[name]}.json"
    config = json.loads(file.read_text())
    if layers is not None:
        config["num_hidden_layers"] = layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
    kind = CONFIG_MAPPING[config.pop("model_type")]
    if shrink > 1:
        defaults = kind(**config)
        for width in ("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "head_dim"):
            if hasattr(defaults, width):
                config[width] = getattr(defaults, width) // shrink
    return kind(**config)


@torch.no_grad()
def draw_weights(model: nn.Module, config: Any) -> None:
    """Give every parameter values that depend on its name alone, so that every library starts alike.

    Args:
        model: its parameters may be sharded. Those of experts may be this rank's part, one of as many as processes.
        config: the model's.
    """
    config = config.get_text_config()
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if ".experts." in name:
            first = 0 if len(whole) == experts else dist.get_rank() * len(whole)
            for number, of_expert in enumerate(whole, first):
                draw_weight(f"{name}.{number}", of_expert, config.initializer_range)
        else:
            draw_weight(name, whole, config.initializer_range)
        if isinstance(parameter, DTensor):
            # Every rank takes its shard of what it has drawn.
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(whole)


def token_ids(configuration: Configuration, vocabulary: int, dp_rank: int, shrink: int = 1) -> torch.Tensor:
    """Random tokens [batch, length], the same for the ranks that share a sequence."""
    generator = torch.Generator().manual_seed(dp_rank)
    return torch.randint(vocabulary, (configuration.batch, configuration.length // shrink), generator=generator)


def video_batch(configuration: Configuration, config: Any) -> dict[str, torch.Tensor]:
    """One video of random frames, with random tokens in place of timestamps before each row of its grid.

    Returns:
        input_ids, labels, mm_token_type_ids: int64 [1, S]. Video tokens have no label.
        pixel_values_videos: bfloat16 [patches, channels * frames * patch_size ** 2].
        video_grid_thw: int64 [1, 3].
    """
    vision = config.vision_config
    rows, side = configuration.frames // vision.temporal_patch_size, FRAME_SIDE // vision.patch_size
    tokens = (side // vision.spatial_merge_size) ** 2
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, (rows, TIMESTAMP + tokens), generator=generator)
    ids[:, TIMESTAMP:] = config.video_token_id
    ids = ids.reshape(1, -1)
    of_video = ids == config.video_token_id
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(of_video, -100),
        "mm_token_type_ids": 2 * of_video.long(),
        "pixel_values_videos": torch.randn(rows * side * side, width, generator=generator).bfloat16(),
        "video_grid_thw": torch.tensor([[rows, side, side]]),
    }


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def free_memory() -> None:
    """Free a finished configuration's memory; models are in reference cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(step: Callable[[], torch.Tensor], tokens: int, steps: int, device: torch.device) -> dict[str, Any]:
    """Time `step`, which trains once on all ranks and returns this rank's share of the loss.

    The host runs ahead, as in training; events mark the end of each step. The median over `steps` after the warm-up,
    of the slowest rank.

    Args:
        tokens: of one step, over all ranks.

    Returns:
        Fields of `opslot.bench.result.StepRow`.
    """
    losses = [step() for _ in range(WARM_UP)]
    seconds = _time_steps(step, steps, losses, device)
    slowest = torch.tensor([statistics.median(seconds), _peak_gib(device)], dtype=torch.float64, device=device)
    whole = torch.stack([loss.detach().float() for loss in losses])
    if dist.is_initialized():
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(whole)
    typical, gib = slowest.tolist()
    values = whole.tolist()
    return {
        "gpus": world_size(),
        "tokens_per_s": tokens / typical / world_size(),
        "peak_gib": gib or None,
        "ms": 1000 * typical,
        "first_loss": values[0],
        "last_loss": values[-1],
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


def record(file: str | None, configuration: Configuration, implementation: str, result: dict[str, Any]) -> None:
    """Print a row and append it to `file`, for the first rank."""
    row = {
        "model": MODELS[configuration.model],
        "implementation": implementation,
        "batch": configuration.batch,
        "length": configuration.length,
        "setup": configuration.setup(),
        **result,
    }
    print(json.dumps(row), flush=True)
    if file is not None:
        with open(file, "a") as handle:
            handle.write(json.dumps(row) + "\n")
