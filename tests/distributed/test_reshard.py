"""Forward passes without gradients between those of training, under FSDP2."""

import pytest
import torch

import opslot
from opslot.distributed import clip_grad_norm, init_parallel_state
from tests.distributed import tiny


def forward_without_gradients(reshard, peek):
    """Two steps, each with or without a forward pass under no_grad between backward and clipping."""
    state = init_parallel_state(device_type="cpu")
    torch.manual_seed(0)
    model = opslot.parallelize(tiny.build("llama", "eager"), state, reshard_after_forward=reshard).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(2):
        loss = tiny.loss_of(model, state)
        loss.backward()
        if peek:
            with torch.no_grad():
                tiny.loss_of(model, state)
        norm = clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found += [float(loss), float(norm)]
    return found


@pytest.mark.quick("False")
@pytest.mark.parametrize("reshard", [True, False])
def test_forward_without_gradients_before_a_step_changes_nothing(ranks, reshard):
    plain, peeked = (ranks.run(forward_without_gradients, reshard, peek) for peek in (False, True))
    assert peeked == plain
