"""What the examples share: arguments, a tiny chat checkpoint, made-up data."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, set_seed

import opslot

CHAT_TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message['content'] + '<|im_end|>' }}{% endif %}
{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def parse(description: str | None, argv: Sequence[str] | None, *flags: str) -> argparse.Namespace:
    """The arguments that all examples take, and boolean `flags`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", help="folder of a checkpoint; default a tiny random model")
    parser.add_argument("--data", help="JSON lines; default made-up data")
    parser.add_argument("--kernels", default="auto", help="auto, eager, a preset, or none to leave opslot out")
    parser.add_argument("--max-steps", type=int, default=4)
    parser.add_argument("--output", help="folder of the trained model; default none is saved")
    for flag in flags:
        parser.add_argument(f"--{flag}", action="store_true")
    return parser.parse_args(argv)


def load(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model with opslot's kernels, and its tokenizer."""
    set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or make_checkpoint(Path(folder))
        model = AutoModelForCausalLM.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
    if options.kernels != "none":
        print(opslot.apply(model, options.kernels))
    return model, tokenizer


def make_checkpoint(folder: Path) -> Path:
    """Save a random Qwen3 of 0.1 million parameters with a byte-level tokenizer and a chat template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([], BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=special))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def conversations(options: argparse.Namespace) -> Dataset:
    """Samples with `messages`: from --data, or questions with their answers."""
    if options.data:
        return load_dataset("json", data_files=options.data, split="train")
    return Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": f"{a} + {b} ="},
                    {"role": "assistant", "content": str(a + b)},
                ]
            }
            for a in range(6)
            for b in range(6)
        ]
    )


def trainer_arguments(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Arguments that every trainer takes: here for seconds on a CPU, in practice yours."""
    return {
        "output_dir": folder,
        "max_steps": options.max_steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": torch.cuda.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available(),
    }


def finish(trainer: Any, options: argparse.Namespace) -> list[float]:
    """Train and save; returns the loss of each step."""
    trainer.train()
    if options.output:
        trainer.save_model(options.output)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
