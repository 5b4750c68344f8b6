"""Chat demo: fine-tune a small model until it answers in a tagged format.

    python -m demos.sft [--output outputs/demo-sft] [--steps N]

Makes chats about numbers, trains a tokenizer on them, runs `opslot train configs/sft_demo.yaml`, and compares the
answers to held-out questions before and after. Needs no network and no GPU; takes a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demos.command import arguments_of, run_demo, train_demo
from opslot.data.python_sources import train_tokenizer

if TYPE_CHECKING:
    from rich.console import Console

VOCABULARY = 512
FORMAT = re.compile(r"<kind>(after|before|parity)</kind><answer>(\w+)</answer>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTIONS = {
    "after": ("What comes after {}?", "Which number follows {}?", "{} plus one is?", "Name the number after {}."),
    "before": ("What comes before {}?", "Which number precedes {}?", "{} minus one is?", "Name the number before {}."),
    "parity": ("Is {} even or odd?", "Even or odd: {}?", "What is the parity of {}?", "Tell me whether {} is even."),
}
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "max_position_embeddings": 256,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns its exit code."""
    return run_demo("sft", __doc__.splitlines()[0], "sft_demo", "demo-sft", _demo, argv)


def _demo(options: argparse.Namespace, console: Console) -> None:
    console.rule("[bold]1. chats and tokenizer")
    held_out = write_inputs(options.output)
    questions = [question for question, _ in held_out]
    console.print(f"chats, tokenizer and model configuration are in {options.output}", highlight=False)
    before = answer_untrained(arguments_of(options), questions)
    trainer = train_demo(options, console)
    if trainer is None:
        return
    console.rule("[bold]3. held-out questions")
    after = answer(trainer.output_dir / "hf", questions)
    for question, first, last in list(zip(questions, before, after, strict=True))[:4]:
        console.print(f"{question}\n  before: {first!r}\n  after:  {last!r}", highlight=False, markup=False)
    for name, answers in (("before", before), ("after", after)):
        well_formed, right = rates(held_out, answers)
        console.print(f"{name}: {well_formed:.0%} well-formed, {right:.0%} right, of {len(held_out)}", highlight=False)


def write_inputs(output: Path) -> list[tuple[str, str]]:
    """Write train.jsonl, eval.jsonl, the tokenizer and config.json; returns held-out questions and their answers."""
    rng = random.Random(0)
    pairs = [
        (question.format(number), answer_to(kind, number))
        for kind, questions in QUESTIONS.items()
        for question in questions
        for number in range(1, 100)
    ]
    rng.shuffle(pairs)
    held_out, trained = pairs[:100], pairs[100:]
    folder = output / "data"
    folder.mkdir(parents=True)
    texts = []
    with (folder / "train.jsonl").open("w") as train, (folder / "eval.jsonl").open("w") as evaluation:
        for number in range(4000):
            messages = _chat(rng.sample(trained, rng.randint(1, 3)))
            train.write(json.dumps({"messages": messages}) + "\n")
            if number < 1000:
                texts += [message["content"] for message in messages]
        for pair in held_out:
            evaluation.write(json.dumps({"messages": _chat([pair])}) + "\n")
    model = output / "model"
    train_tokenizer(texts, model, VOCABULARY, ["<|im_start|>", "<|im_end|>"], "<|im_end|>", TEMPLATE)
    (model / "config.json").write_text(json.dumps(MODEL, indent=2) + "\n")
    return held_out


def answer_to(kind: str, number: int) -> str:
    """The answer in the trained format."""
    found = {"after": str(number + 1), "before": str(number - 1), "parity": "odd" if number % 2 else "even"}
    return f"<kind>{kind}</kind><answer>{found[kind]}</answer>"


def rates(expected: list[tuple[str, str]], answers: list[str]) -> tuple[float, float]:
    """Fractions of well-formed and of right answers."""
    well_formed = sum(FORMAT.fullmatch(found) is not None for found in answers)
    right = sum(found == wanted for (_, wanted), found in zip(expected, answers, strict=True))
    return well_formed / len(answers), right / len(answers)


def answer_untrained(arguments: list[str], questions: list[str]) -> list[str]:
    """Answers of the model that the run starts from."""
    from rich.console import Console

    from opslot.trainer.parse import load_config
    from opslot.trainer.text import TextTrainer

    trainer = TextTrainer(load_config(arguments), callbacks=[], console=Console(quiet=True))
    return trainer.generate(questions, 24)


def answer(folder: Path, questions: list[str]) -> list[str]:
    """Answers of an exported model, with plain Transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from opslot.trainer.generating import generate_answer

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return [generate_answer(model, tokenizer, question, 24) for question in questions]


def _chat(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [
        message
        for question, found in pairs
        for message in ({"role": "user", "content": question}, {"role": "assistant", "content": found})
    ]


if __name__ == "__main__":
    sys.exit(main())
