"""End-to-end demo: train a tokenizer and a Qwen3-MoE with 10M parameters on the sources of the standard library.

    python -m opslot.trainer.demo [--output outputs/demo] [--steps N]

Needs no network, no GPU and no data except Python's own sources; takes less than five minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opslot._base.errors import ConfigError, OpslotError
from opslot.data.python_sources import VOCABULARY, train_tokenizer, write_sources
from opslot.trainer.threads import wait_without_spinning

if TYPE_CHECKING:
    from rich.console import Console

    from opslot.trainer.base import TrainResult
    from opslot.trainer.text import TextTrainer

PROMPT = "def read_lines(path, encoding=None):\n"

# Sizes with a fast step on a CPU: a quarter of the FLOPs is in the vocabulary, most of the rest in the experts.
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 512,
    "moe_intermediate_size": 160,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.01,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

BATCH_SIZE, LENGTH = 4, 512  # small: with a million tokens in total, more steps help more than larger batches

# A slow machine trains fewer steps instead of longer.
TRAINING_SECONDS = 200
STEPS = 650


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns its exit code."""
    wait_without_spinning()
    from opslot.trainer.display import make_console

    parser = argparse.ArgumentParser("python -m opslot.trainer.demo", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/demo"), help="output folder (default: %(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=None,
        help=f"optimizer steps; default {STEPS}, or as many as fit into {TRAINING_SECONDS} s",
    )
    options = parser.parse_args(argv)
    console = make_console()
    try:
        return _demo(options.output, options.steps, console)
    except OpslotError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 2


def _demo(output: Path, steps: int | None, console: Console) -> int:
    from opslot.trainer.main import run
    from opslot.trainer.parse import load_config

    started = time.monotonic()
    clear_output(output)
    console.rule("[bold]1. text and tokenizer")
    documents = write_sources(output / "data")
    train_tokenizer([text for text, _ in documents], output / "model")
    (output / "model" / "config.json").write_text(json.dumps(MODEL, indent=2) + "\n")
    characters = sum(len(text) for text, _ in documents)
    console.print(
        f"{len(documents)} modules of {sys.implementation.name} {sys.version.split()[0]}, "
        f"{characters / 1e6:.1f}M characters; "
        f"a byte-level BPE tokenizer of {VOCABULARY} tokens in {time.monotonic() - started:.0f} s",
        highlight=False,
    )
    config_file = write_config(output)
    if steps is None:
        steps = affordable_steps([str(config_file)])
    console.rule(f"[bold]2. opslot train {config_file} --train.max_steps {steps}")
    trainer, result = run(load_config([str(config_file), f"--train.max_steps={steps}"]), console)
    if not result.completed:
        return 0
    console.rule("[bold]3. results")
    report(trainer, result, console)
    console.print(f"\ntotal: {time.monotonic() - started:.0f} s", highlight=False)
    return 0


def write_config(output: Path) -> Path:
    """Write the YAML file for `opslot train`."""
    import yaml

    config = {
        "model": {"config_path": str(output / "model")},
        "data": {
            "train_path": str(output / "data" / "train.jsonl"),
            "eval_path": str(output / "data" / "eval.jsonl"),
            "max_seq_len": LENGTH,
            "cache_dir": str(output / "cache"),
        },
        "train": {
            "output_dir": str(output / "run"),
            "max_steps": STEPS,
            "global_batch_size": BATCH_SIZE,
            "lr": 3e-3,
            "lr_scheduler": "cosine",
            "warmup_steps": 50,
            "weight_decay": 0.1,
            "checkpoint": {"save_steps": 200},
            "eval_steps": 200,
        },
    }
    path = output / "demo.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def affordable_steps(argv: list[str]) -> int:
    """Steps of this configuration that fit into `TRAINING_SECONDS`, at most `STEPS`; estimated from three steps."""
    from rich.console import Console

    from opslot.trainer.parse import load_config
    from opslot.trainer.text import TextTrainer

    trainer = TextTrainer(load_config(argv), callbacks=[], console=Console(quiet=True))
    batches = iter(trainer.batches)
    seconds = []
    for _ in range(4):
        begun = time.perf_counter()
        trainer.forward(next(batches), num_items_in_batch=1).loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun)
    return max(20, min(STEPS, int(TRAINING_SECONDS / min(seconds[1:]))))


def report(trainer: TextTrainer, result: TrainResult, console: Console) -> None:
    """Print the loss and the entropy of the text, a sample generated by Transformers, and the output files."""
    from rich.markup import escape
    from rich.syntax import Syntax
    from rich.table import Table

    from opslot.trainer.callbacks import read_metrics

    assert result.record is not None
    table = Table.grid(padding=(0, 2))
    table.add_row("unigram entropy of the text", f"[bold]{trainer.unigram_entropy:.3f}[/] nats per token")
    last = [record["loss"] for record in read_metrics(trainer.output_dir)][-50:]
    table.add_row(f"loss, mean of the last {len(last)} steps", f"[bold]{sum(last) / len(last):.3f}[/]")
    table.add_row("loss on held-out modules", f"[bold]{result.record.extra['eval_loss']:.3f}[/]")
    console.print(table)
    console.print("\nsample, generated by Transformers from the exported checkpoint:", highlight=False)
    console.print(Syntax(sample(trainer.output_dir / "hf"), "python", background_color="default", word_wrap=True))
    files = {
        "model": "hf",
        "loss curve": "loss.png",
        "metrics": "metrics.jsonl",
        "kernels": "kernels.txt",
        "configuration": "config.yaml",
        "checkpoints": "checkpoints",
        "TensorBoard": "tensorboard",
    }
    where = Table.grid(padding=(0, 2))
    for name, file in files.items():
        where.add_row(name, escape(str(trainer.output_dir / file)))
    console.print("output files:", highlight=False)
    console.print(where)


def sample(folder: Path, tokens: int = 120, seed: int = 0) -> str:
    """Continue `PROMPT` with the checkpoint in `folder`, using Transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(seed)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=True, temperature=0.6, top_k=40, pad_token_id=0)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def path_arguments(output: Path) -> list[str]:
    """Arguments of `opslot train` for the inputs and outputs of a demo."""
    return [
        f"--model.config_path={output / 'model'}",
        f"--data.train_path={output / 'data' / 'train.jsonl'}",
        f"--data.eval_path={output / 'data' / 'eval.jsonl'}",
        f"--data.cache_dir={output / 'cache'}",
        f"--train.output_dir={output / 'run'}",
    ]


def clear_output(output: Path) -> None:
    """Remove the output of an earlier demo; any other folder is an error."""
    if not output.exists():
        return
    if (
        any(output.iterdir())
        and not (output / "demo.yaml").is_file()
        and not (output / "data" / "train.jsonl").is_file()
    ):
        raise ConfigError(f"{output} is not the output of an earlier demo", hint="choose another folder with --output")
    shutil.rmtree(output)


if __name__ == "__main__":
    sys.exit(main())
