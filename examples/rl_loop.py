"""A policy-gradient loop of your own on opslot: no trainer, one process or several (torchrun).

Answers are sampled and rewarded for their digits; in practice an inference engine samples them.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from common import make_checkpoint, parse
from transformers import AutoTokenizer, set_seed

import opslot
from opslot.checkpoint import export_hf, load_weights
from opslot.distributed import clip_grad_norm, get_parallel_state, init_parallel_state, sum_over_ranks

PROMPTS, ANSWERS = 4, 4


@contextlib.contextmanager
def checkpoint(options: Any) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield options.model or str(make_checkpoint(Path(folder)))


def build(path: str, kernels: str) -> Any:
    """The model, sharded where there are several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        init_parallel_state()
    state = get_parallel_state()
    model = opslot.build_foundation_model(
        path, init_device="meta", run_device=state.device.type, ops_implementation=kernels
    )
    return opslot.parallelize(model, state, load=lambda model: load_weights(model, path, device=state.device))


@torch.no_grad()
def sample(model: Any, tokenizer: Any, step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts and answers [B, S], and the labels: the answers alone."""
    first = (step * get_parallel_state().dp_size + get_parallel_state().dp_rank) * PROMPTS
    texts = [f"{10 + n} + {10 + n} =" for n in range(first, first + PROMPTS)]
    prompts = tokenizer(texts, return_tensors="pt").input_ids.to(device).repeat_interleave(ANSWERS, 0)
    ids = model.generate(prompts, do_sample=True, top_k=0, min_new_tokens=6, max_new_tokens=6)
    labels = ids.clone()
    labels[:, : prompts.shape[1]] = -100
    return ids, labels


def advantages(tokenizer: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The reward of each answer, relative to the others of its prompt [B, 1]."""
    texts = [tokenizer.decode(row[label != -100]) for row, label in zip(ids, labels, strict=True)]
    rewards = torch.tensor([sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts], device=ids.device)
    rewards = rewards.view(-1, ANSWERS)
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)


def train_step(model: Any, optimizer: Any, ids: torch.Tensor, labels: torch.Tensor, advantage: torch.Tensor) -> float:
    """Two clipped policy-gradient updates (PPO) on one batch; returns the mean log-probability before them."""
    (tokens,) = sum_over_ranks(float((labels[:, 1:] != -100).sum()))
    old = None
    for _ in range(2):
        # Per token, without the logits [B, S, V].
        log_probs = model(input_ids=ids, labels=labels, return_log_probs=True, use_cache=False).log_probs
        old = log_probs.detach() if old is None else old
        ratio = (log_probs - old).exp()
        objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        # Ranks sum their gradients, so each divides by the tokens of all.
        loss = -(objective * (labels.roll(-1, 1) != -100)).sum() / tokens
        loss.backward()
        clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    (total,) = sum_over_ranks(float(old.sum()))
    return total / tokens


def main(argv: Sequence[str] | None = None) -> list[float]:
    options = parse(__doc__, argv)
    set_seed(0)
    history = []
    with checkpoint(options) as path:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = build(path, options.kernels)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        device = get_parallel_state().device
        for step in range(options.max_steps):
            ids, labels = sample(model, tokenizer, step, device)
            history.append(train_step(model, optimizer, ids, labels, advantages(tokenizer, ids, labels)))
            print(f"step {step}: log-probability {history[-1]:.4f}")
            # New weights for the inference engine, e.g. llm.load_weights(opslot.named_weights(model)) of vLLM. While it
            # samples, the GPU can be its own.
            weights = {name: tuple(tensor.shape) for name, tensor in opslot.named_weights(model)}
            assert "model.embed_tokens.weight" in weights
            opslot.offload(model, optimizer)
            opslot.reload(model, optimizer)
        if options.output:
            export_hf(model, options.output, processors=[tokenizer])
    return history


if __name__ == "__main__":
    main()
