"""A run that exceeds a GPU's memory ends with one error that names settings which need less."""

from types import SimpleNamespace

import pytest
import torch

from opslot._base.errors import TrainingError
from opslot.trainer.config import RunConfig
from opslot.trainer.out_of_memory import memory_errors, state_bytes


@pytest.mark.parametrize(
    ("changes", "free", "found", "hint"),
    [
        ({}, 2, "micro batches have 4 x 32 tokens", "lower train.micro_batch_size (4), with which a step accumulates"),
        ({}, 30, "other processes hold 50.0 GiB of it", "end the other processes, or lower train.micro_batch_size (4)"),
        ({"activation_checkpointing": "full"}, 2, "take 0.0 GiB", "or set train.activation_offload: true, or lower"),
    ],
)
def test_out_of_memory_is_one_error_with_remedies(train, settings, monkeypatch, changes, free, found, hint):
    settings["train"] |= {"max_steps": 3, **changes}
    update = torch.optim.AdamW.step

    def step(optimizer, *args):
        update(optimizer, *args)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15.16 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (free << 30, 100 << 30))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: (98 if free == 2 else 20) << 30)
    code, _, err = train()
    assert code == 1
    assert err.startswith("opslot: error: step 1: out of GPU memory, allocating 15.16 GiB\n")
    assert "found: the GPU has 100.0 GiB; " in err
    assert found in err
    assert hint in err
    assert "Traceback" not in err


def test_state_that_exceeds_the_memory_is_named(settings, monkeypatch):
    """Smaller batches would not help."""
    model = torch.nn.Linear(1000, 1000, bias=False)
    trainer = SimpleNamespace(config=RunConfig(), device=torch.device("cpu"), step=0, model=model)
    trainer.config.data.max_seq_len = 2048
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (0, 16 << 20))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 16 << 20)
    with pytest.raises(TrainingError) as raised, memory_errors(trainer):
        raise torch.OutOfMemoryError
    assert state_bytes(model, trainer.config.train.optimizer) == 16_000_000
    assert raised.value.hint == (
        "set train.optimizer.name: adamw_8bit, or train adapters (lora.r: 16), or use more GPUs"
    )
