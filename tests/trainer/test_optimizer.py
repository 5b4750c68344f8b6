import pytest
import torch
import transformers

from opslot.trainer.config import OptimizerConfig, TrainConfig
from opslot.trainer.optimizer import build_optimizer, learning_rate
from opslot.verify.tiny import tiny_config
from tests.trainer.runs import curve


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 0.1 + 0.9 * 0.8535533906, 0.55, 0.1 + 0.9 * 0.1464466094]),
        ("warmup_stable_decay", [0.5, 1.0, 1.0, 1.0, 0.55]),
    ],
)
def test_learning_rate_schedules(scheduler, expected):
    train = TrainConfig(lr=2.0, lr_scheduler=scheduler, warmup_steps=2)
    train.optimizer = OptimizerConfig(min_lr_ratio=0.1, decay_ratio=0.4)
    got = [learning_rate(train, step, 5) / 2.0 for step in range(1, 6)]
    assert got == pytest.approx(expected)


@pytest.mark.parametrize("decay_ratio", [0.8, 1.0])
def test_decay_starts_from_the_peak_after_a_long_warmup(decay_ratio):
    train = TrainConfig(lr=1.0, lr_scheduler="warmup_stable_decay", warmup_steps=2)
    train.optimizer = OptimizerConfig(decay_ratio=decay_ratio)
    got = [learning_rate(train, step, 5) for step in range(1, 6)]
    assert got == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25])


def test_warmup_below_one_is_a_fraction_of_the_steps():
    def rates(warmup, steps):
        train = TrainConfig(lr=1.0, warmup_steps=warmup)
        return [learning_rate(train, step, steps) for step in range(1, steps + 1)]

    assert rates(0.4, 10) == rates(4, 10)
    assert rates(0.03, 100) == rates(3, 100)
    assert rates(0.03, 10)[0] > 0.9  # less than one step


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
    decayed, free = build_optimizer(model, TrainConfig(lr=1e-3, weight_decay=0.3)).param_groups
    assert [p.shape for p in decayed["params"]] == [(3, 3)]
    assert decayed["params"][0] is model["linear"].weight
    assert decayed["weight_decay"] == 0.3
    assert free["weight_decay"] == 0.0
    assert len(free["params"]) == 4


@pytest.mark.parametrize("name", ["adamw_torch", "muon"])
@pytest.mark.parametrize(
    ("arch", "vectors"),
    [
        ("gpt_oss", ["gate_up_proj_bias", "down_proj_bias", "sinks"]),
        ("mamba", ["A_log", "D"]),
        ("kimi_linear", ["A_log"]),
        ("rwkv", ["time_mix_key"]),
    ],
)
def test_stacked_biases_and_decay_rates_are_not_matrices(arch, vectors, name):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny_config(arch))
    train = TrainConfig(lr=1e-3, weight_decay=0.3, optimizer=OptimizerConfig(name=name))
    groups = build_optimizer(model, train).param_groups
    own = {id(p): group for group in groups for p in group["params"]}
    found = [own[id(p)] for path, p in model.named_parameters() if path.rpartition(".")[2] in vectors]
    assert len(found) >= len(vectors)
    assert not any(group["weight_decay"] or group.get("use_muon") for group in found)
    matrices = [
        own[id(p)]
        for path, p in model.named_parameters()
        if path.endswith(("q_proj.weight", "_proj", "key.weight", "in_proj.weight"))
    ]
    assert all(group["weight_decay"] == 0.3 for group in matrices)
    assert matrices


def test_clipping_can_be_turned_off(settings, train, tmp_path):
    curves = {}
    for limit in (1.0, 1e9, 0, None):
        settings["train"] |= {"max_grad_norm": limit, "output_dir": str(tmp_path / f"{limit}")}
        assert train()[0] == 0
        curves[limit] = curve(tmp_path / f"{limit}")
    assert curves[None] == curves[0] == curves[1e9]
    assert curves[None] != curves[1.0]


@pytest.mark.parametrize("patterns", [["*embed_tokens*"], ["model.layers.1", "*norm*"]])
def test_learning_rate_of_frozen_parameters_raises(train, settings, patterns):
    settings["train"] |= {"freeze": ["model.layers.1", "*embed_tokens*"], "lr_of": dict.fromkeys(patterns, 1e-3)}
    code, _, error = train()
    assert code == 2
    assert f"train.lr_of: {patterns[0]!r} matches no trained parameter" in error
