import pytest
import torch

from opslot.trainer.config import OptimizerConfig, TrainConfig
from opslot.trainer.optimizer import build_optimizer, learning_rate


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 0.1 + 0.9 * 0.8535533906, 0.55, 0.1 + 0.9 * 0.1464466094]),
    ],
)
def test_learning_rate_schedules(scheduler, expected):
    train = TrainConfig(lr=2.0, lr_scheduler=scheduler, warmup_steps=2, optimizer=OptimizerConfig(min_lr_ratio=0.1))
    got = [learning_rate(train, step, 5) / 2.0 for step in range(1, 6)]
    assert got == pytest.approx(expected)


def test_weight_decay_of_matrices_only_and_no_frozen_parameters():
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(4, 3),
            "linear": torch.nn.Linear(3, 3),
            "norm": torch.nn.LayerNorm(3),
            "head": torch.nn.Linear(3, 4, bias=False),
            "frozen": torch.nn.Linear(3, 3),
        }
    )
    model["head"].weight = model["embed"].weight
    model["frozen"].requires_grad_(False)
    decayed, free = build_optimizer(model, TrainConfig(weight_decay=0.3)).param_groups
    assert [p.shape for p in decayed["params"]] == [(3, 3)]
    assert decayed["params"][0] is model["linear"].weight
    assert decayed["weight_decay"] == 0.3
    assert free["weight_decay"] == 0.0
    assert len(free["params"]) == 4
