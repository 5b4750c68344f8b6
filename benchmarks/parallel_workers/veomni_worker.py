"""VeOmni's training steps for `benchmarks/parallel.py`, one process per GPU.

Needs veomni and the Transformers release that it pins. Its kernels are its best on Hopper: FlashAttention 4, quack for
experts, Liger's fused loss; fused AdamW, and clipping without its copy of the norm to the host.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from veomni.arguments.arguments_types import MixedPrecisionConfig, OpsImplementationConfig
from veomni.distributed.parallel_state import clear_parallel_state, get_parallel_state, init_parallel_state
from veomni.distributed.torch_parallelize import build_parallelize_model
from veomni.models import build_foundation_model
from veomni.optim import build_optimizer
from veomni.utils.loss_utils import count_loss_token, mean_global_loss, reduce_global_loss_token
from workload import (
    CONFIGURATIONS,
    LEARNING_RATE,
    MAX_NORM,
    Configuration,
    draw_weights,
    free_memory,
    local_device,
    measure,
    model_config,
    record,
    token_ids,
    world_size,
)


def start(configuration: Configuration, device: torch.device, overlap: bool) -> Any:
    """VeOmni's parallel state."""
    clear_parallel_state()
    sp, ep = configuration.sizes()
    init_parallel_state(
        dp_size=world_size() // sp,
        ulysses_size=sp,
        extra_parallel_sizes=(ep,),
        device_type=device.type,
        async_enabled=overlap,
    )
    return get_parallel_state()


def build(configuration: Configuration, options: argparse.Namespace) -> Any:
    ops = ("moe", "cross_entropy_loss", "rms_norm", "swiglu_mlp", "rotary_pos_emb", "load_balancing_loss")
    eager = {f"{op}_implementation": "eager" for op in ops}
    fast = {"moe_implementation": options.moe}
    chosen = OpsImplementationConfig(attn_implementation=options.attention, **(eager if options.shrink > 1 else fast))
    model = build_foundation_model(
        model_config(configuration.model, options.layers, options.shrink),
        torch_dtype="float32",
        init_device="meta",
        ops_implementation=chosen,
    )
    model = build_parallelize_model(
        model,
        init_device="meta",
        mixed_precision=MixedPrecisionConfig(enable=True),
        enable_gradient_checkpointing=False,
    )
    draw_weights(model, model.config)
    model.train()
    return model


def batch_of(ids: torch.Tensor, state: Any, device: torch.device, recurrent: bool) -> dict[str, Any]:
    """What VeOmni's collators give the model: one row of all samples where a recurrence or sequence parallelism needs
    their boundaries; with sequence parallelism the local shifted labels and positions."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    if not state.sp_enabled and not recurrent:
        return {"input_ids": ids.to(device), "labels": ids.to(device), "position_ids": positions.to(device)}
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100) if state.sp_enabled else ids
    parts = {"input_ids": ids, "labels": labels, "position_ids": positions}
    bounds = torch.arange(len(ids) + 1, dtype=torch.int32, device=device) * ids.shape[1]
    ranks = state.sp_size if state.sp_enabled else 1
    rank = state.sp_rank if state.sp_enabled else 0
    return {
        **{name: x.reshape(1, -1).chunk(ranks, 1)[rank].contiguous().to(device) for name, x in parts.items()},
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": ids.shape[1],
        "max_length_k": ids.shape[1],
    }


def run(configuration: Configuration, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    state = start(configuration, device, options.overlap)
    model = build(configuration, options)
    optimizer = build_optimizer(model, lr=LEARNING_RATE, weight_decay=0.01, fused=True)
    dp_rank = dist.get_rank() // state.sp_size
    ids = token_ids(configuration, model.config.vocab_size, dp_rank, options.shrink)
    recurrent = "linear_attention" in (getattr(model.config, "layer_types", None) or ())
    batch = batch_of(ids, state, device, recurrent)
    counted = count_loss_token({"labels": batch["labels"].cpu()})
    whole = reduce_global_loss_token(counted)

    def step() -> torch.Tensor:
        outputs = model(**batch, use_cache=False)
        losses = mean_global_loss(outputs.loss, counted, counted, whole)
        loss = torch.stack(list(losses.values())).sum()
        loss.backward()
        model.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        # Its optimizer of several meshes takes no set_to_none.
        optimizer.zero_grad()
        # FSDP averages gradients, so VeOmni's shares are its number of ranks too large.
        return loss.detach() / world_size()

    result = measure(step, ids.numel() * world_size() // state.sp_size, options.steps, device)
    return {**result, "kernels": f"attention {options.attention}, moe {options.moe}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configurations", nargs="*", help=f"of {', '.join(CONFIGURATIONS)}; default all")
    parser.add_argument("--layers", type=int, help="default those of the model's file")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--attention", default="flash_attention_4")
    parser.add_argument("--moe", default="fused_quack")
    parser.add_argument("--overlap", action="store_true", help="VeOmni's asynchronous Ulysses")
    parser.add_argument("--shrink", type=int, default=1, help="eager, widths and lengths divided, to try it on a CPU")
    parser.add_argument("--rows", help="file to append rows to")
    options = parser.parse_args()
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    for name in options.configurations or CONFIGURATIONS:
        if CONFIGURATIONS[name].frames:
            continue
        result = run(CONFIGURATIONS[name], options, device)
        if dist.get_rank() == 0:
            record(options.rows, CONFIGURATIONS[name], "VeOmni", result)
        free_memory()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
