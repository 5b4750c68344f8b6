"""Reinforcement learning with TRL's GRPO and opslot's kernels: answers are rewarded for their digits."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from common import conversations, finish, load, parse, trainer_arguments
from trl import GRPOConfig, GRPOTrainer


def share_of_digits(completions: list, **columns) -> list[float]:
    """The reward of each completion, between 0 and 1."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(character.isdigit() for character in text) / max(len(text), 1) for text in texts]


def main(argv: Sequence[str] | None = None) -> list[float]:
    options = parse(__doc__, argv)
    model, tokenizer = load(options)
    data = conversations(options).map(lambda sample: {"prompt": sample["messages"][:1]}, remove_columns=["messages"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model,
            reward_funcs=share_of_digits,
            args=GRPOConfig(
                **trainer_arguments(options, folder),
                num_generations=4,
                max_completion_length=256 if options.model else 6,
            ),
            train_dataset=data,
            processing_class=tokenizer,
        )
        return finish(trainer, options)


if __name__ == "__main__":
    main()
