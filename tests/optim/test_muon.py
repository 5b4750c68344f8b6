"""Muon: orthogonalized updates of matrices, AdamW for the rest."""

import pytest
import torch
from torch import nn

from opslot._base.errors import ConfigError
from opslot.optim import selection
from opslot.optim.muon import Muon, orthogonalize
from opslot.trainer.config import OptimizerConfig, TrainConfig
from opslot.trainer.optimizer import build_optimizer, set_learning_rate


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (3, 8, 5)])
def test_singular_values_are_near_one(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(x, 5))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_equals_the_muon_of_torch():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(8, 6, bias=False), nn.Linear(8, 6, bias=False)
    theirs.load_state_dict(ours.state_dict())
    mine = Muon([{"params": [ours.weight], "use_muon": True}], lr=0.02, weight_decay=0.1)
    other = torch.optim.Muon([theirs.weight], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
        for model, optimizer in ((ours, mine), (theirs, other)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    # torch computes the Newton-Schulz steps in bfloat16.
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=2e-3)


def test_stacked_matrices_are_updated_one_by_one():
    stack = nn.Parameter(torch.randn(3, 6, 4))
    each = [nn.Parameter(matrix.detach().clone()) for matrix in stack]
    for params in ([stack], each):
        for p in params:
            p.grad = torch.ones_like(p) * p.detach()
        Muon([{"params": params, "use_muon": True}], lr=0.1).step()
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in each]))


def language_model():
    from transformers import AutoModelForCausalLM

    from opslot.verify.tiny import tiny_config

    config = tiny_config("qwen3_moe")
    config.tie_word_embeddings = False
    return AutoModelForCausalLM.from_config(config)


def test_groups_of_a_model():
    model = language_model()
    settings = OptimizerConfig(name="muon", groups=[{"params": "*.q_proj.weight", "lr": 0.5, "weight_decay": 0}])
    optimizer = build_optimizer(model, TrainConfig(lr=1.0, weight_decay=0.1, optimizer=settings))
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    assert found.keys() == set(names.values())
    assert {name for name, group in found.items() if not group.get("use_muon")} == {
        name for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name or name == "lm_head.weight"
    }
    query = found["model.layers.0.self_attn.q_proj.weight"]
    assert (query["lr_scale"], query["weight_decay"]) == (0.5, 0)
    experts = found["model.layers.0.mlp.experts.down_proj"]
    assert (experts["lr_scale"], experts["weight_decay"], experts["use_muon"]) == (1.0, 0.1, True)
    set_learning_rate(optimizer, 0.2)
    assert query["lr"] == 0.1


@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "BertForTokenClassification"])
def test_head_of_a_classifier_is_not_a_hidden_matrix(architecture):
    import transformers

    from opslot.verify.tiny import tiny_config

    model = getattr(transformers, architecture)(tiny_config("bert"))
    optimizer = build_optimizer(model, TrainConfig(lr=1.0, optimizer=OptimizerConfig(name="muon")))
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)] for group in optimizer.param_groups if group.get("use_muon") for p in group["params"]}
    assert "bert.encoder.layer.0.attention.self.query.weight" in found
    assert "classifier.weight" not in found


def test_adapters_of_the_embedding_and_the_head_are_not_hidden_matrices():
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "embed_tokens", "lm_head"]
    model = peft.get_peft_model(language_model(), peft.LoraConfig(r=2, target_modules=targets))
    optimizer = build_optimizer(model, TrainConfig(lr=1.0, optimizer=OptimizerConfig(name="muon")))
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)] for group in optimizer.param_groups if group.get("use_muon") for p in group["params"]}
    assert found == {name for name, p in model.named_parameters() if p.requires_grad and "q_proj" in name}


def test_group_without_a_parameter_raises():
    settings = OptimizerConfig(groups=[{"params": ["*.weights"], "lr": 0.1}])
    with pytest.raises(ConfigError, match="matches no trainable parameter"):
        build_optimizer(nn.Linear(2, 2), TrainConfig(optimizer=settings))


@pytest.mark.parametrize(
    ("present", "sharded", "on_gpu", "problem"),
    [
        ((), False, True, "pip install torchao"),
        (("bitsandbytes",), True, True, "cannot update sharded parameters; pip install torchao"),
        (("bitsandbytes",), False, False, "needs a GPU; pip install torchao"),
        (("bitsandbytes",), False, True, None),
        (("torchao",), True, False, None),
    ],
)
def test_missing_8_bit_packages(monkeypatch, present, sharded, on_gpu, problem):
    monkeypatch.setattr(selection, "has_package", lambda name: name in present)
    found = selection.eight_bit_problem(sharded, on_gpu)
    assert found is None if problem is None else problem in found


@pytest.mark.parametrize("signed", [False, True])
def test_8_bit_moments_are_saved_exactly(signed):
    pytest.importorskip("torchao")
    from torchao.optim.subclass_8bit import OptimState8bit

    from opslot.checkpoint.quantized_moments import plain_state, quantized_state

    held, other, resharded = (OptimState8bit.zeros((64, 256), signed=signed) for _ in range(3))
    held.copy_(torch.randn(64, 256) if signed else torch.rand(64, 256))
    saved = plain_state({"state": {"w": {"exp_avg": held, "step": 1}}})
    loaded = quantized_state({"state": {"w": {"exp_avg": other, "step": 0}}}, saved)
    assert loaded == {"state": {"w": {"exp_avg": other, "step": 1}}}
    assert torch.equal(other.codes, held.codes)
    assert torch.equal(other.scale, held.scale)
    shifted = {name: tensor.view(-1).roll(128).view(64, 256) for name, tensor in saved["state"]["w"]["exp_avg"].items()}
    quantized_state({"exp_avg": resharded}, {"exp_avg": shifted})
    expected = held.dequantize().view(-1).roll(128).view(64, 256)
    torch.testing.assert_close(resharded.dequantize(), expected, rtol=0.1, atol=0.02)
