"""Training step of the two 8-layer models of the goals, each contender in a process of its own.

    python benchmarks/gpu_step.py --model dense moe --mode opslot opslot-torch-adamw hf liger --output FILE [--profile]

Batch 2 x 8192 random tokens, bf16 parameters, fused AdamW, random weights. Prints one table: ms, tokens/s, peak GiB
and loss.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import subprocess
import sys

import torch

DENSE = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
MOE = {
    **DENSE,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.001,
}
BATCH, LENGTH = 2, 8192


def config_of(model: str):
    from transformers import Qwen3Config, Qwen3MoeConfig

    return Qwen3Config(**DENSE) if model == "dense" else Qwen3MoeConfig(**MOE)


def build(model: str, mode: str, ops: dict):
    """The contender's model on the GPU in bf16."""
    config = config_of(model)
    torch.manual_seed(0)
    if mode.startswith("opslot"):
        import opslot

        built = opslot.build_foundation_model(
            config, torch_dtype="bfloat16", init_device="cuda", ops_implementation=ops
        )
        return built, str(opslot.explain(built))
    if mode.startswith("liger"):
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3, apply_liger_kernel_to_qwen3_moe

        (apply_liger_kernel_to_qwen3 if model == "dense" else apply_liger_kernel_to_qwen3_moe)()
    from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

    cls = Qwen3ForCausalLM if model == "dense" else Qwen3MoeForCausalLM
    with torch.device("cuda"):
        built = cls._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    built.train()
    return (torch.compile(built) if mode.endswith("compile") else built), ""


def adamw(mode: str):
    """Everybody's optimizer is torch's fused AdamW but that of mode "opslot", which has its own kernel for it."""
    if mode == "opslot":
        from opslot.ops.adamw.triton import AdamW

        return AdamW
    return functools.partial(torch.optim.AdamW, fused=True)


def measure(model: str, mode: str, steps: int, ops: dict, profile: bool) -> dict:
    """Median of `steps` steps after warm-up."""
    built, table = build(model, mode, ops)
    optimizer = adamw(mode)(built.parameters(), lr=1e-5)
    generator = torch.Generator("cuda").manual_seed(1)
    ids = torch.randint(0, DENSE["vocab_size"], (BATCH, LENGTH), device="cuda", generator=generator)

    def step() -> torch.Tensor:
        loss = built(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    losses = [step().item() for _ in range(3)]
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    # As training runs: the host goes ahead and nothing waits between steps. Events say when each one was done.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        loss = step()
        mark.record()
    torch.cuda.synchronize()
    ms = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    result = {
        "model": model,
        "mode": mode,
        "ms": ms,
        "tokens_per_s": BATCH * LENGTH / ms * 1e3,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "first_loss": losses[0],
        "last_loss": loss.item(),
        "kernels": table,
    }
    if profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            step()
            torch.cuda.synchronize()
        result["profile"] = trace.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=70
        )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["dense", "moe"], choices=["dense", "moe"])
    parser.add_argument("--mode", nargs="+", default=["opslot", "hf", "liger"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="opslot's ops_implementation")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--output")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    ops = dict(item.split("=", 1) for item in options.set)
    if options.one:
        print("RESULT " + json.dumps(measure(options.model[0], options.mode[0], options.steps, ops, options.profile)))
        return 0
    rows = []
    for model in options.model:
        for mode in options.mode:
            command = [
                sys.executable,
                __file__,
                "--one",
                "--model",
                model,
                "--mode",
                mode,
                "--steps",
                str(options.steps),
            ]
            command += [f"--set={item}" for item in options.set] + (["--profile"] if options.profile else [])
            done = subprocess.run(command, capture_output=True, text=True)
            line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
            if line is None:
                rows.append(
                    {"model": model, "mode": mode, "error": done.stderr.strip().splitlines()[-1:] or "no output"}
                )
                print(f"{model} {mode}: failed\n{done.stderr[-1500:]}")
                continue
            row = json.loads(line.removeprefix("RESULT "))
            rows.append(row)
            if row["kernels"] and mode == "opslot":
                print("\n".join(x[:150] for x in row["kernels"].splitlines()))
            if "profile" in row:
                print("\n".join(x[:72] + x[-90:] for x in row["profile"].splitlines()))
    print(f"{'model':6} {'mode':14} {'ms':>8} {'tok/s':>8} {'GiB':>6} {'loss':>8} {'after':>8}")
    for row in rows:
        if "ms" in row:
            print(
                f"{row['model']:6} {row['mode']:14} {row['ms']:8.1f} {row['tokens_per_s']:8.0f} {row['peak_gib']:6.1f} "
                f"{row['first_loss']:8.4f} {row['last_loss']:8.4f}"
            )
        else:
            print(f"{row['model']:6} {row['mode']:14} failed: {row['error']}")
    if options.output:
        from opslot.testing.bench import environment

        with open(options.output, "w") as file:
            json.dump({"environment": environment("cuda"), "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
