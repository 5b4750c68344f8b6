"""Training steps over several GPUs of one host: tokens a second and GPU, memory, loss.

    torchrun --nproc-per-node 4 benchmarks/gpu_parallel.py [CONFIGURATION ...] [--layers 8] [--pipeline 2] [--json FILE]

Random weights, fp32 master weights, bfloat16 computation, fused AdamW, no activation checkpointing. On one GPU
`dense-fsdp` and `moe-fsdp` give what scaling is measured against.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import opslot
from opslot.distributed import (
    ParallelState,
    clip_grad_norm,
    destroy_parallel_state,
    failing_together,
    init_parallel_state,
    shard_sequence,
)
from opslot.models.parallel import parallelize_model

MODELS = {
    "dense": (
        "qwen3",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "moe": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
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
    """A model, how it is spread (0 stands for all processes), and what a step of one data-parallel rank holds."""

    model: str
    sp: int = 1
    ep: int = 1
    rows: int = 2
    length: int = 8192


CONFIGURATIONS = {
    "dense-fsdp": Configuration("dense"),
    "moe-fsdp": Configuration("moe"),
    "moe-ep": Configuration("moe", ep=0),
    "dense-sp": Configuration("dense", sp=0, rows=1, length=32768),
    "moe-ep-sp": Configuration("moe", sp=0, ep=0, rows=1, length=32768),
}


def model_config(name: str, layers: int) -> PreTrainedConfig:
    architecture, sizes = MODELS[name]
    shared = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 32768, "tie_word_embeddings": False}
    return CONFIG_MAPPING[architecture](**shared, **sizes, num_hidden_layers=layers)


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Any], targets: torch.Tensor
) -> torch.Tensor:
    outputs = model(**batch, use_cache=False, num_items_in_batch=targets)
    loss = outputs.loss
    if (router := getattr(outputs, "aux_loss", None)) is not None:
        # Every rank has a whole router loss, and losses of ranks add up.
        loss = loss - (1 - 1 / dist.get_world_size()) * model.config.router_aux_loss_coef * router
    loss.backward()
    clip_grad_norm(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def measure(configuration: Configuration, state: ParallelState, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    model = opslot.build_foundation_model(
        model_config(configuration.model, options.layers),
        init_device=state.device.type,
        ops_implementation=options.ops,
    )
    parallelize_model(model, state, param_dtype=torch.bfloat16, ulysses_pipeline=options.pipeline)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    generator = torch.Generator().manual_seed(state.dp_rank)
    shape = configuration.rows, configuration.length
    ids = torch.randint(model.config.vocab_size, shape, generator=generator)
    batch = shard_sequence({"input_ids": ids, "labels": ids}, state)
    batch = {
        name: value.to(state.device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()
    }
    tokens = ids.numel() * state.dp_size
    targets = torch.tensor((ids.numel() - len(ids)) * state.dp_size, device=state.device)
    # What building the model whole took is gone by now.
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    losses, seconds = [], []
    for _ in range(3 + options.steps):
        dist.barrier()
        torch.accelerator.synchronize()
        started = time.perf_counter()
        losses.append(train_step(model, optimizer, batch, targets))
        torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - started)
    whole = torch.stack(losses)
    dist.all_reduce(whole)
    typical = statistics.median(seconds[3:])
    return {
        "tokens_per_s_per_gpu": round(tokens / typical / state.world_size),
        "gib": round(torch.accelerator.max_memory_allocated() / 2**30, 1),
        "ms": round(1000 * typical, 1),
        "losses": [round(value, 4) for value in whole[:3].tolist()],
        "kernels": {row.op: row.chosen for row in opslot.explain(model).rows},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configurations", nargs="*", help=f"of {', '.join(CONFIGURATIONS)}; default all")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--ops", default="auto")
    parser.add_argument("--pipeline", type=int, default=1, help="parts of the heads under sequence parallelism")
    parser.add_argument("--json")
    options = parser.parse_args()
    results = {}
    for name in options.configurations or CONFIGURATIONS:
        configuration = CONFIGURATIONS[name]
        sizes = {axis: getattr(configuration, axis) or _world_size() for axis in ("sp", "ep")}
        state = init_parallel_state(**sizes)
        with failing_together():
            result = measure(configuration, state, options)
        if state.rank == 0:
            results[name] = {**asdict(configuration), "world_size": state.world_size, **result}
            print(f"{name:12} {state}: {json.dumps(result)}", flush=True)
            if options.json:
                with open(options.json, "w") as file:
                    json.dump(
                        {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **results}, file, indent=1
                    )
        destroy_parallel_state(keep_group=True)
    destroy_parallel_state()


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


if __name__ == "__main__":
    main()
