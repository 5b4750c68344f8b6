"""Train with a loop of your own, Accelerate and opslot's kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from common import conversations, load, parse
from torch.utils.data import DataLoader


def main(argv: Sequence[str] | None = None) -> list[float]:
    options = parse(__doc__, argv)
    model, tokenizer = load(options)

    def collate(samples: list[dict]) -> dict[str, torch.Tensor]:
        texts = [tokenizer.apply_chat_template(sample["messages"], tokenize=False) for sample in samples]
        batch = tokenizer(texts, padding=True, truncation=True, max_length=1024, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}

    accelerator = Accelerator()
    loader = DataLoader(conversations(options), batch_size=4, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # A model that moves to a GPU here selects its kernels again.
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    losses = []
    for batch, _ in zip(loader, range(options.max_steps)):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.print(f"step {len(losses)}: loss {losses[-1]:.4f}")
    if options.output:
        accelerator.unwrap_model(model).save_pretrained(options.output)
    return losses


if __name__ == "__main__":
    main()
