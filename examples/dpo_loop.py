"""Direct preference optimization in a loop of your own: LoRA, and log-probabilities without the logits.

The model without its adapters is the reference, so there is no second model in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from common import conversations, load, parse
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F

BETA, PAIRS = 0.1, 4
WRONG = {"role": "assistant", "content": "I don't know"}


def encode(tokenizer: Any, prompt: list[dict], answer: dict) -> tuple[list[int], list[int]]:
    """The tokens of a conversation, and its labels: the answer alone."""
    start = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    ids = tokenizer.apply_chat_template([*prompt, answer])["input_ids"]
    return ids, [-100] * len(start) + ids[len(start) :]


def batch_of(tokenizer: Any, samples: list[dict], device: torch.device) -> dict[str, torch.Tensor]:
    """The chosen answers, then the rejected ones."""
    chosen = [encode(tokenizer, sample["messages"][:-1], sample["messages"][-1]) for sample in samples]
    rejected = [encode(tokenizer, sample["messages"][:-1], WRONG) for sample in samples]
    ids, labels = zip(*chosen, *rejected, strict=True)
    size = max(map(len, ids))

    def padded(rows: Sequence[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([row + [value] * (size - len(row)) for row in rows], device=device)

    input_ids = padded(ids, tokenizer.pad_token_id)
    mask = padded([[1] * len(row) for row in ids], 0)
    return {"input_ids": input_ids, "attention_mask": mask, "labels": padded(labels, -100)}


def log_ratio(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """log p(chosen) - log p(rejected) of each pair."""
    chosen, rejected = model(**batch, return_log_probs=True, use_cache=False).log_probs.sum(1).chunk(2)
    return chosen - rejected


def main(argv: Sequence[str] | None = None) -> list[float]:
    options = parse(__doc__, argv)
    model, tokenizer = load(options)
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    data, history = conversations(options), []
    for step in range(options.max_steps):
        samples = [data[(step * PAIRS + number) % len(data)] for number in range(PAIRS)]
        batch = batch_of(tokenizer, samples, model.device)
        with torch.no_grad(), model.disable_adapter():
            reference = log_ratio(model, batch)
        loss = -F.logsigmoid(BETA * (log_ratio(model, batch) - reference)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
        print(f"step {step}: loss {history[-1]:.4f}")
    if options.output:
        model.save_pretrained(options.output, save_embedding_layers=False)
    return history


if __name__ == "__main__":
    main()
