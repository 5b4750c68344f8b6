"""Supervised fine-tuning on chat data with TRL and opslot's kernels: full or LoRA, packed or padded."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from common import conversations, finish, load, parse, trainer_arguments
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer


def main(argv: Sequence[str] | None = None) -> list[float]:
    options = parse(__doc__, argv, "lora", "packing")
    model, tokenizer = load(options)
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model,
            args=SFTConfig(
                **trainer_arguments(options, folder),
                max_length=1024 if options.model else 64,
                packing=options.packing,
                assistant_only_loss=True,
            ),
            train_dataset=conversations(options),
            processing_class=tokenizer,
            # Layers around adapters keep their kernels.
            peft_config=LoraConfig(r=8, target_modules="all-linear") if options.lora else None,
        )
        return finish(trainer, options)


if __name__ == "__main__":
    main()
