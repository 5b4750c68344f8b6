"""Steps of fine-tuning, one process per row: `memory.py` and `lora.py` measure with it.

    python benchmarks/fine_tuning_step.py TASK

TASK is a `Task` as JSON. The process imports what it needs, waits for a line of input, measures, and writes the fields
of a StepRow to the task's file. So the next process can import while one measures.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from opslot._base.device import best_device

# opslot.bench imports Transformers, which Unsloth patches as it is imported, so functions import it.
if TYPE_CHECKING:
    from opslot.bench.result import StepRow

PACKAGES = {"opslot": "opslot", "PEFT": "peft", "PEFT + Liger-Kernel": "liger_kernel", "Unsloth": "unsloth"}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
RANK = 16
_STD = 0.02


@dataclass(frozen=True)
class Task:
    """One row.

    Attributes:
        name: what the model is called in tables.
        config: a Transformers config as plain data.
        method: full, lora or qlora (nf4).
        experts: whether the stacked weights of experts have adapters, too.
        memory: activation checkpointing, "none", "selective" or "full", with ", offload" to offload activations.
        batch, length: samples of a step, and tokens of each.
        result: the file that the process writes.
    """

    name: str
    implementation: str
    config: dict[str, Any]
    method: str
    memory: str
    batch: int
    length: int
    steps: int
    experts: bool = False
    result: str = ""

    @property
    def setup(self) -> str:
        on = " on attention" if not self.experts and "num_experts" in self.config else ""
        return f"{self.method}{on}, checkpointing {self.memory}"

    @property
    def description(self) -> str:
        return f"{self.name} {self.implementation} {self.setup} {self.batch} x {self.length}"

    @property
    def targets(self) -> list[str]:
        """Names of the linear layers with adapters; those of experts are stacked weights."""
        return list(ATTENTION if "num_experts" in self.config else LINEAR)


def shrunk(config: dict[str, Any], layers: int | None, by: int) -> dict[str, Any]:
    """The config with another number of layers, and with widths divided by `by`, to try a script on a CPU."""
    config = config | {"num_hidden_layers": layers or config["num_hidden_layers"]}
    for name in ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_experts"):
        if name in config:
            # Grouped matmuls need rows of 16 bytes.
            config[name] = max(8, config[name] // by // 8 * 8)
    config["num_attention_heads"] = max(config["num_key_value_heads"], config["num_attention_heads"] // by)
    config["head_dim"] //= min(by, 8)
    return config


def run_rows(tasks: Sequence[Task], timeout: int) -> Iterator[StepRow]:
    """Measure the tasks in turn, each in a process of its own; the next one starts to import meanwhile."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        waiting: _Process | None = None
        for i, task in enumerate(tasks):
            process = waiting or _Process(task, Path(folder) / f"{i}", stack)
            waiting = _Process(tasks[i + 1], Path(folder) / f"{i + 1}", stack) if i + 1 < len(tasks) else None
            yield process.measure(timeout)


class _Process:
    """The process of one task, which waits until it is to measure."""

    def __init__(self, task: Task, path: Path, stack: contextlib.ExitStack) -> None:
        self._task = dataclasses.replace(task, result=str(path))
        self._errors = path.with_suffix(".errors")
        self._process = None
        if importlib.util.find_spec(PACKAGES[task.implementation]) is None:
            return
        from opslot.bench.step import process_environment

        command = [sys.executable, __file__, json.dumps(dataclasses.asdict(self._task))]
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                env=process_environment(None),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                text=True,
            )
        stack.callback(self._process.kill)

    def measure(self, timeout: int) -> StepRow:
        from opslot.bench.result import StepRow
        from opslot.bench.step import reason

        task = self._task
        row = StepRow(task.name, task.implementation, task.batch, task.length, task.setup)
        if self._process is None:
            return dataclasses.replace(row, error=f"{PACKAGES[task.implementation]} is not installed")
        try:
            self._process.communicate("go\n", timeout=timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return dataclasses.replace(row, error=f"took more than {timeout} s")
        if not Path(task.result).exists():
            return dataclasses.replace(row, error=reason(self._errors.read_text()) or "ended without a result")
        return dataclasses.replace(row, **json.loads(Path(task.result).read_text()))


def measure(task: Task) -> dict[str, Any]:
    """The fields of a StepRow; `check` is the norm of the trained parameters' gradient in the first step."""
    from opslot.bench.step_process import measure_steps

    device = torch.device(best_device().torch_type)
    builders = {"opslot": _build_opslot, "Unsloth": _build_unsloth}
    model, optimizer, kernels = builders.get(task.implementation, _build_baseline)(task, device)
    draw_adapters(model)
    vocabulary = task.config["vocab_size"]
    generator = torch.Generator().manual_seed(0)

    def batch_at(step: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, vocabulary, (task.batch, task.length), generator=generator).to(device)
        return {"input_ids": ids, "labels": ids}

    first = batch_at(0)
    model(**first, use_cache=False).loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad.float() for p in model.parameters() if p.grad is not None])
    optimizer.zero_grad(set_to_none=True)
    found = measure_steps(model, optimizer, lambda step: first if step == 0 else batch_at(step), task.steps, device)
    losses = found.pop("losses")
    check = f"gradient norm {norm:.6g}" if all(map(torch.isfinite, torch.tensor(losses))) else "WRONG: not finite"
    return {**found, "first_loss": losses[0], "last_loss": losses[-1], "check": check, "kernels": kernels}


@torch.no_grad()
def draw_adapters(model: Any) -> None:
    """Give both factors of every LoRA adapter values that depend on the module's name and their shape alone."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ".lora_" in name:
            # PEFT wraps the layer of one stacked weight around that of another, in any order.
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            seed = zlib.crc32(f"{plain} {list(parameter.shape)}".encode())
            generator = torch.Generator(parameter.device).manual_seed(seed)
            # In one dtype: Unsloth's adapters are float32.
            drawn = torch.empty(parameter.shape, device=parameter.device).normal_(0.0, _STD, generator=generator)
            parameter.copy_(drawn)


def _build_opslot(task: Task, device: torch.device) -> tuple[Any, Any, str]:
    from transformers import AutoConfig

    import opslot
    from opslot.models._adapters.nf4 import quantize_layers
    from opslot.trainer.config import LoraConfig, TrainConfig
    from opslot.trainer.lora import add_adapters
    from opslot.trainer.optimizer import build_optimizer

    model: Any = opslot.build_foundation_model(
        AutoConfig.for_model(**task.config), torch_dtype="bfloat16", init_device="meta", run_device=device.type
    )
    if task.method == "qlora":
        quantize_layers(model)
    if task.method != "full":
        add_adapters(model, LoraConfig(r=RANK, target_modules=task.targets, experts=task.experts), None)
    mode, _, offload = task.memory.partition(", ")
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
    """The values of `draw_weights`; a weight that is to be quantized is drawn and quantized alone."""
    from opslot.bench.step_process import draw_weight
    from opslot.checkpoint.adapters import base_model, has_adapters, initialize_adapters
    from opslot.checkpoint.initialize import initialize, materialize

    def drawn(name: str, like: torch.Tensor) -> torch.Tensor:
        weight = torch.empty(like.shape, dtype=torch.bfloat16, device=device)
        draw_weight(name, weight, _STD)
        return weight

    with base_model(model):
        for path, module in model.named_modules():
            if hasattr(module, "load_weight"):
                module.load_weight(drawn(f"{path}.weight", module.weight), device)
            for name, load in getattr(module, "load_weights", {}).items():
                load(drawn(f"{path}.{name}", getattr(module, name)), device)
        names = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        buffers = [name for name, buffer in model.named_buffers() if buffer.is_meta]
        materialize(model, device)
        initialize(model, [], buffers)
        for name in names:
            draw_weight(name, model.get_parameter(name), _STD)
    if has_adapters(model):
        initialize_adapters(model, 0, device)


def _build_baseline(task: Task, device: torch.device) -> tuple[Any, Any, str]:
    if task.implementation == "PEFT + Liger-Kernel":
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        MODEL_TYPE_TO_APPLY_LIGER_FN[task.config["model_type"]]()
    model = _transformers_model(task, device)
    if task.method == "qlora":
        import bitsandbytes

        from opslot.models._adapters.nf4 import quantize_layers

        weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
        for path in quantize_layers(model):
            layer: Any = model.get_submodule(path)
            layer.load_weight(weights[f"{path}.weight"], device)
            layer.__class__ = bitsandbytes.nn.Linear4bit
        del weights
    if task.method != "full":
        import peft

        weights = ["experts.gate_up_proj", "experts.down_proj"] if task.experts else None
        config = peft.LoraConfig(
            r=RANK,
            lora_alpha=2 * RANK,
            target_modules=task.targets,
            target_parameters=weights,
            task_type="CAUSAL_LM",
        )
        # As opslot's: in the dtype of the model.
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    if task.memory == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model, _adamw(model), ""


def _transformers_model(task: Task, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    from opslot.bench.step_process import draw_weights

    config = AutoConfig.for_model(**task.config)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    draw_weights(model, _STD)
    return model


def _build_unsloth(task: Task, device: torch.device) -> tuple[Any, Any, str]:
    from unsloth import FastLanguageModel

    # It holds the weights, so in memory where there is room.
    shared = Path("/dev/shm")
    has_room = shared.is_dir() and shutil.disk_usage(shared).free > 32 << 30
    with tempfile.TemporaryDirectory(dir=shared if has_room else None) as folder:
        _transformers_model(task, device).save_pretrained(folder)
        _save_tokenizer(folder, task.config["vocab_size"])
        if device.type == "cuda":
            torch.cuda.empty_cache()
        model, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=task.length, load_in_4bit=task.method == "qlora", dtype=torch.bfloat16
        )
    # It gives stacked experts adapters, too, where their projections are named.
    targets = LINEAR if task.experts else task.targets
    checkpointing = {"none": False, "full": True, "full, offload": "unsloth"}[task.memory]
    model = FastLanguageModel.get_peft_model(
        model, r=RANK, lora_alpha=2 * RANK, target_modules=list(targets), use_gradient_checkpointing=checkpointing
    )
    # As TRL's trainer, with which it is used: the adapters are float32.
    model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)
    model.train()
    return model, _adamw(model), ""


def _save_tokenizer(folder: str, vocabulary: int) -> None:
    """A tokenizer of single words, which loading requires."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {name: i for i, name in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(vocabulary - 3))])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    tokenizer.save_pretrained(folder)


def _adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    task = Task(**json.loads(parser.parse_args().task))
    if task.implementation == "Unsloth":
        os.environ |= {"HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1"}
    # Unsloth patches Transformers and must be imported before it.
    for name in (PACKAGES[task.implementation], "transformers", "peft"):
        importlib.import_module(name)
    sys.stdin.readline()
    result = measure(task)
    Path(task.result).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
