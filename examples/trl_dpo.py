"""Preference training with TRL's DPO, LoRA and opslot's kernels."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from common import conversations, finish, load, parse, trainer_arguments
from datasets import Dataset, load_dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer


def preferences(options) -> Dataset:
    """Samples with `prompt`, `chosen` and `rejected`: from --data, or right and wrong answers."""
    if options.data:
        return load_dataset("json", data_files=options.data, split="train")
    wrong = [{"role": "assistant", "content": "I don't know"}]
    return Dataset.from_list(
        [
            {"prompt": messages[:1], "chosen": messages[1:], "rejected": wrong}
            for messages in conversations(options)["messages"]
        ]
    )


def main(argv: Sequence[str] | None = None) -> list[float]:
    options = parse(__doc__, argv)
    model, tokenizer = load(options)
    with tempfile.TemporaryDirectory() as folder:
        trainer = DPOTrainer(
            model,
            args=DPOConfig(**trainer_arguments(options, folder), max_length=1024 if options.model else 64),
            train_dataset=preferences(options),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=8, target_modules="all-linear"),
        )
        return finish(trainer, options)


if __name__ == "__main__":
    main()
