"""Peak memory and tokens/s of fine-tuning an 8B model on one GPU: one run, one result file.

    python benchmarks/memory.py [--only TEXT ...] [--lengths 8192 32768] --output FILE

Rows: full fine-tuning, LoRA and QLoRA, each without activation checkpointing, with selective and full checkpointing,
and with full checkpointing and offloaded activations. Beside opslot: PEFT with Transformers' own code (as in TRL),
Liger-Kernel with PEFT, and Unsloth, where they are installed. bfloat16 parameters, AdamW, one sequence a step, random
weights. Each row runs in a process of its own; one that runs out of memory is recorded with its error.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from opslot._base.device import best_device
from opslot.bench import Environment, OutputFiles, Result, Run, StepRow, recorded_command
from opslot.bench.step import process_environment, reason
from opslot.bench.step_process import draw_weights, measure_steps
from opslot.bench.table import steps_table

METHODS = ("full", "lora", "qlora")
MEMORY = ("none", "selective", "full", "full, offload")
PACKAGES = {"opslot": "opslot", "peft": "peft", "liger + peft": "liger_kernel", "unsloth": "unsloth"}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_RANK = 16


def tasks(lengths: list[int]) -> list[dict[str, Any]]:
    """The rows, opslot's first; the baselines have no selective checkpointing, and Unsloth offloads by itself."""
    found = []
    for length in lengths:
        for method in METHODS:
            for memory in MEMORY:
                found.append({"implementation": "opslot", "method": method, "memory": memory, "length": length})
        for name in ("peft", "liger + peft"):
            for method in METHODS:
                for memory in ("none", "full"):
                    found.append({"implementation": name, "method": method, "memory": memory, "length": length})
        for method in METHODS[1:]:
            found.append({"implementation": "unsloth", "method": method, "memory": "full, offload", "length": length})
    return found


def _setup(task: dict[str, Any]) -> str:
    return f"{task['method']}, checkpointing {task['memory']}"


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Run in a process of its own: the fields of a StepRow."""
    device = torch.device(best_device().torch_type)
    builders = {"opslot": _build_opslot, "unsloth": _build_unsloth}
    model, optimizer, kernels = builders.get(task["implementation"], _build_baseline)(task, device)
    vocabulary = task["config"]["vocab_size"]
    generator = torch.Generator().manual_seed(0)

    def batch_at(step: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, vocabulary, (1, task["length"]), generator=generator).to(device)
        return {"input_ids": ids, "labels": ids}

    found = measure_steps(model, optimizer, batch_at, task["steps"], device)
    losses = found.pop("losses")
    check = "unchecked: random weights" if all(map(torch.isfinite, torch.tensor(losses))) else "a loss is not finite"
    return {**found, "first_loss": losses[0], "last_loss": losses[-1], "check": check, "kernels": kernels}


def _build_opslot(task: dict[str, Any], device: torch.device) -> tuple[Any, Any, str]:
    from transformers import AutoConfig

    import opslot
    from opslot.models.quantized_linear import quantize_linear_layers
    from opslot.trainer.config import LoraConfig, TrainConfig
    from opslot.trainer.lora import add_adapters
    from opslot.trainer.optimizer import build_optimizer

    model: Any = opslot.build_foundation_model(
        AutoConfig.for_model(**task["config"]), torch_dtype="bfloat16", init_device="meta", run_device=device.type
    )
    if task["method"] == "qlora":
        quantize_linear_layers(model)
    if task["method"] != "full":
        add_adapters(model, LoraConfig(r=_RANK, target_modules=TARGETS), None)
    mode, _, offload = task["memory"].partition(", ")
    opslot.parallelize(
        model,
        activation_checkpointing=mode,
        activation_offload=bool(offload),
        load=lambda sharded: _draw(sharded, device),
    )
    model.train()
    return model, build_optimizer(model, TrainConfig(lr=1e-5)), str(opslot.explain(model))


@torch.no_grad()
def _draw(model: Any, device: torch.device) -> None:
    """Random values; a weight that is to be quantized is drawn and quantized alone."""
    from opslot.checkpoint.adapters import base_model, has_adapters, initialize_adapters
    from opslot.checkpoint.initialize import initialize
    from opslot.checkpoint.materialize import materialize

    for module in model.modules():
        if hasattr(module, "load_weight") and module.weight.is_meta:
            shape = module.weight.shape
            module.load_weight(torch.randn(shape, dtype=torch.bfloat16, device=device) * 0.02, device)
    with base_model(model):
        names = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        buffers = [name for name, buffer in model.named_buffers() if buffer.is_meta]
        materialize(model, device, None)
        initialize(model, [], buffers)
        for name in names:
            parameter = model.get_parameter(name)
            parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0.0, 0.02)
    if has_adapters(model):
        initialize_adapters(model, 0, device)


def _build_baseline(task: dict[str, Any], device: torch.device) -> tuple[Any, Any, str]:
    from transformers import AutoConfig, AutoModelForCausalLM

    if task["implementation"].startswith("liger"):
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3()
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**task["config"]), dtype=torch.bfloat16)
    draw_weights(model, 0, 0.02)
    if task["method"] == "qlora":
        from opslot.models.quantized_linear import quantize_linear_layers

        weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
        for path in quantize_linear_layers(model):
            model.get_submodule(path).load_weight(weights[f"{path}.weight"], device)
        del weights
    if task["method"] != "full":
        import peft

        config = peft.LoraConfig(r=_RANK, lora_alpha=2 * _RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
    if task["memory"] == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model, _adamw(model), ""


def _build_unsloth(task: dict[str, Any], device: torch.device) -> tuple[Any, Any, str]:
    from transformers import AutoConfig, AutoModelForCausalLM
    from unsloth import FastLanguageModel

    with tempfile.TemporaryDirectory() as folder:
        with torch.device(device):
            model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**task["config"]), dtype=torch.bfloat16)
        model.save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
        model, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=task["length"], load_in_4bit=task["method"] == "qlora", dtype=torch.bfloat16
        )
    model = FastLanguageModel.get_peft_model(
        model, r=_RANK, lora_alpha=2 * _RANK, target_modules=TARGETS, use_gradient_checkpointing="unsloth"
    )
    return model, _adamw(model), ""


def _adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)


def run_row(task: dict[str, Any], timeout: int) -> StepRow:
    """Measure `task` in a process of its own."""
    row = StepRow(task["name"], task["implementation"], 1, task["length"], _setup(task))
    if importlib.util.find_spec(PACKAGES[task["implementation"]]) is None:
        return dataclasses.replace(row, error=f"{PACKAGES[task['implementation']]} is not installed")
    command = [sys.executable, __file__, "--worker", json.dumps(task)]
    try:
        done = subprocess.run(command, env=process_environment(None), capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return dataclasses.replace(row, error=f"took more than {timeout} s")
    if done.returncode:
        return dataclasses.replace(row, error=reason(done.stderr))
    return dataclasses.replace(row, **json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "models" / "qwen3_8b_width.json")
    parser.add_argument("--layers", type=int, default=36, help="of the model; 36 is Qwen3-8B whole")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--only", nargs="+", default=[], help="rows whose description has each of these texts")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--shrink", type=int, default=1, help="divide widths and lengths, to try it on a CPU")
    parser.add_argument("--timeout", type=int, default=240, help="seconds for a row")
    parser.add_argument("--commit", help="commit to record where there is no git")
    parser.add_argument("--output", help="write the result as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(json.loads(options.worker))))
        return 0
    config = json.loads(options.model.read_text()) | {"num_hidden_layers": options.layers}
    for name in ("vocab_size", "hidden_size", "intermediate_size"):
        config[name] //= options.shrink
    config["num_attention_heads"] = max(config["num_key_value_heads"], config["num_attention_heads"] // options.shrink)
    config["head_dim"] //= min(options.shrink, 8)
    files = OutputFiles(options.output)
    environment = Environment.current(best_device().torch_type, options.commit)
    run = Run(recorded_command("python", *sys.argv), environment, [name for name in PACKAGES if name != "opslot"])
    name = "qwen3_8b" if options.layers == 36 and options.shrink == 1 else f"{options.model.stem}_{options.layers}"
    for task in tasks([length // options.shrink for length in options.lengths]):
        text = f"{task['implementation']} {_setup(task)} {task['length']}"
        if all(part in text for part in options.only):
            run.steps.append(run_row(task | {"config": config, "steps": options.steps, "name": name}, options.timeout))
            row = run.steps[-1]
            print(text, row.error or f"{row.tokens_per_s:,.0f} tokens/s, {row.peak_gib} GiB", flush=True)
            files.write(Result("benchmarks/memory.py", [run]))
    print(steps_table(run.steps))
    return 0 if any(not row.error for row in run.steps) else 1


if __name__ == "__main__":
    sys.exit(main())
