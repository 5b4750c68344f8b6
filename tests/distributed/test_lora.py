"""PEFT's adapters on two ranks: the same losses and gradient norms as in one process."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from opslot.distributed import clip_grad_norm, get_parallel_state, init_parallel_state, shard_sequence
from opslot.models.parallelize import parallelize
from tests.distributed import tiny


def train(name, sizes, mode="auto"):
    if sizes is not None:
        init_parallel_state(device_type="cpu", **sizes)
    state = get_parallel_state()
    base = tiny.build(name)
    torch.manual_seed(3)
    lora = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = parallelize(get_peft_model(base, lora), state, activation_checkpointing=True, data_parallel_mode=mode)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    history = []
    for step in range(3):
        whole = tiny.rows(step)
        targets = int((whole["labels"][:, 1:] != -100).sum())
        batch = shard_sequence({key: value[state.dp_rank :: state.dp_size] for key, value in whole.items()}, state)
        loss = model(**batch, use_cache=False, num_items_in_batch=torch.tensor(targets)).loss
        loss.backward()
        loss = loss.detach().clone()
        if state.mesh is not None:
            torch.distributed.all_reduce(loss)
        norm = clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append((loss.item(), norm.item()))
    return history


@pytest.mark.parametrize(
    ("name", "sizes", "mode"),
    [("qwen3", {}, "auto"), ("qwen3", {"sp": 2}, "auto"), ("qwen3_moe", {"ep": 2}, "auto"), ("qwen3", {}, "ddp")],
)
def test_two_ranks_equal_one(ranks, name, sizes, mode):
    expected = torch.tensor(train(name, None))
    assert expected[0, 1] > 1e-2
    assert expected[0, 0] != expected[-1, 0]
    for found in ranks.run(train, name, sizes, mode):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=0)
