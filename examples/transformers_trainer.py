"""Train on text with transformers.Trainer and opslot's kernels."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from common import conversations, finish, load, parse, trainer_arguments
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments


def main(argv: Sequence[str] | None = None) -> list[float]:
    options = parse(__doc__, argv)
    model, tokenizer = load(options)

    def tokenize(sample: dict) -> dict:
        text = tokenizer.apply_chat_template(sample["messages"], tokenize=False)
        return tokenizer(text, truncation=True, max_length=1024)

    data = conversations(options)
    data = data.map(tokenize, remove_columns=data.column_names)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(**trainer_arguments(options, folder)),
            train_dataset=data,
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        )
        return finish(trainer, options)


if __name__ == "__main__":
    main()
