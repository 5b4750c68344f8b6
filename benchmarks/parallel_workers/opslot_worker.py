"""opslot's training steps for `benchmarks/parallel.py`, one process per GPU."""

from __future__ import annotations

import argparse
import ast
import functools
from typing import Any

import torch
from workload import (
    CONFIGURATIONS,
    LEARNING_RATE,
    MAX_NORM,
    Configuration,
    draw_weights,
    free_memory,
    measure,
    model_config,
    profile,
    record,
    token_ids,
    video_batch,
)

import opslot
from opslot._base.labels import IGNORE_INDEX
from opslot.data.multimodal.rope_positions import RopePositions
from opslot.distributed import (
    ParallelState,
    clip_grad_norm,
    destroy_parallel_state,
    fail_together,
    gradient_sync,
    init_parallel_state,
    shard_sequence,
)
from opslot.distributed.copy_engine import opened_bytes
from opslot.models.parallelize import parallelize


def build(
    configuration: Configuration, state: ParallelState, parallelism: dict[str, Any], options: argparse.Namespace
) -> Any:
    model = opslot.build_foundation_model(
        model_config(configuration.model, options.layers, options.shrink),
        init_device=state.device.type,
        ops_implementation=dict(item.split("=", 1) for item in options.set),
    )
    draw_weights(model, model.config)
    # The activations of a video's tower do not fit otherwise.
    checkpointing = "full" if configuration.frames else "none"
    defaults = {
        "data_parallel_mode": configuration.data_parallel_mode,
        "param_dtype": torch.bfloat16,
        "activation_checkpointing": checkpointing,
    }
    return parallelize(model, state, **{**defaults, **parallelism})


def parse(name: str) -> tuple[Configuration, dict[str, Any]]:
    """A configuration, and options of `parallelize`."""
    base, *options = name.split("+")
    values = (option.split("=", 1) for option in options)
    return CONFIGURATIONS[base], {
        key: getattr(torch, value.removeprefix("torch.")) if value.startswith("torch.") else ast.literal_eval(value)
        for key, value in values
    }


def adamw(device: torch.device) -> Any:
    if device.type == "cuda":
        from opslot.optim.triton import AdamW

        return AdamW
    return functools.partial(torch.optim.AdamW, fused=True)


def inputs_of(
    configuration: Configuration, model: Any, state: ParallelState, options: argparse.Namespace
) -> dict[str, torch.Tensor]:
    """The global sequences of this data-parallel rank, on the CPU."""
    if not configuration.frames:
        ids = token_ids(configuration, model.config.vocab_size, state.dp_rank, options.shrink)
        return {"input_ids": ids, "labels": ids}
    batch = video_batch(configuration, model.config)
    positions = RopePositions(model.config, model.config.architectures[0])
    found = positions(batch["input_ids"][0], {name: batch[name] for name in ("mm_token_type_ids", "video_grid_thw")})
    return {**batch, "position_ids": found[:, None]}


def run(name: str, configuration: Configuration, parallelism: dict[str, Any], options: argparse.Namespace) -> None:
    sp, ep = configuration.sizes()
    state = init_parallel_state(sp=sp, ep=ep)
    model = build(configuration, state, parallelism, options)
    optimizer = adamw(state.device)(model.parameters(), lr=LEARNING_RATE)
    inputs = inputs_of(configuration, model, state, options)
    ids = inputs["input_ids"]
    targets = (inputs["labels"][:, 1:] != IGNORE_INDEX).sum().to(state.device) * state.dp_size
    batch = {
        name: value.to(state.device) if isinstance(value, torch.Tensor) else value
        for name, value in shard_sequence(inputs, state).items()
    }

    def step() -> torch.Tensor:
        outputs = model(**batch, use_cache=False, num_items_in_batch=targets)
        loss = outputs.loss
        if (router := getattr(outputs, "aux_loss", None)) is not None:
            # Every rank has the whole auxiliary loss, and the ranks' losses are summed.
            loss = loss - (1 - 1 / state.world_size) * model.config.router_aux_loss_coef * router
        with gradient_sync(model, True):
            loss.backward()
        clip_grad_norm(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    # Memory of the unsharded model must not count.
    free_memory()
    result = measure(step, ids.numel() * state.dp_size, options.steps, state.device)
    if result["peak_gib"] is not None:
        result["peak_gib"] += opened_bytes() / 2**30
    kernels = str(opslot.explain(model)).partition("\n\n")[0]
    if state.rank == 0:
        _, *changed = name.split("+")
        implementation = f"opslot ({', '.join(changed)})" if changed else "opslot"
        record(options.rows, configuration, implementation, {**result, "kernels": kernels})
    if options.profile:
        text = profile(step)
        if state.rank == 0:
            print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configurations", nargs="*", help=f"of {', '.join(CONFIGURATIONS)}; default these")
    parser.add_argument("--layers", type=int, help="default those of the model's file")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="ops_implementation")
    parser.add_argument("--profile", action="store_true", help="a table of the first rank's kernels")
    parser.add_argument("--shrink", type=int, default=1, help="divide widths and lengths, to try it on a CPU")
    parser.add_argument("--rows", help="file to append rows to")
    options = parser.parse_args()
    for name in options.configurations or CONFIGURATIONS:
        with fail_together():
            run(name, *parse(name), options)
        destroy_parallel_state(keep_group=True)
        free_memory()
    destroy_parallel_state()


if __name__ == "__main__":
    main()
