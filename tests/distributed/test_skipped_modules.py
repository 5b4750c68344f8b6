"""Experts that are modules get gradients on ranks whose tokens are not routed to them."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import opslot
from opslot.distributed import init_parallel_state
from opslot.models._multimodal.conditional import add_zero_of_skipped_modules
from opslot.verify.random_model import random_ids, random_model, train_step, whole_batch, worst_difference
from opslot.verify.tiny import tiny_config

ARCH = "switch_transformers"


def batch_of(rows):
    batch = whole_batch(random_ids(tiny_config(ARCH)))
    return {name: value[rows] if value.dim() else value for name, value in batch.items()}


def model_of():
    config = tiny_config(ARCH)
    # ReLU passes numbers near 0 or not, by how a CPU rounds batches of different sizes.
    config.dense_act_fn = "silu"
    model = random_model(config).eval()
    opslot.apply(model)
    return model


def on_ranks():
    state = init_parallel_state(device_type="cpu")
    model = model_of()
    opslot.parallelize(model, state)
    own = batch_of(slice(state.rank, state.rank + 1))
    return {key: value.tolist() for key, value in train_step(model, [own]).items()}


def test_ranks_with_tokens_for_different_experts_equal_one_process(ranks):
    expected = train_step(model_of(), [batch_of(slice(None))])
    found = [{key: torch.tensor(value) for key, value in part.items()} for part in ranks.run(on_ranks, timeout=60)]
    found[0]["loss"] += found[1]["loss"]
    assert worst_difference(found[0], expected) == ""


class Experts(nn.ModuleDict):
    def forward(self, x, chosen):
        return self[chosen](x), None


def test_skipped_experts_get_zero_gradients_and_change_no_output():
    torch.manual_seed(0)
    experts = Experts({name: nn.Linear(3, 3) for name in "abc"})
    layer = nn.Sequential(nn.Linear(3, 3), experts)
    x = torch.randn(2, 3)
    expected = experts(x, "b")[0]
    add_zero_of_skipped_modules(layer)
    for chosen in "cb":
        experts.zero_grad()
        found, other = experts(x, chosen)
        found.sum().backward()
    assert torch.equal(found, expected)
    assert other is None
    assert all(not p.grad.any() for name in "ac" for p in experts[name].parameters())
    assert experts["b"].weight.grad.any()
    with torch.no_grad():
        assert torch.equal(experts(x, "b")[0], expected)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = Experts({name: nn.Linear(3, 3) for name in "abc"})

    def forward(self, x, chosen):
        return self.experts(x, chosen)[0]


def test_skipped_experts_get_zero_gradients_in_compiled_code():
    layer = Layer()
    x = torch.randn(2, 3)
    weight = layer.experts["b"].weight
    expected = torch.autograd.grad(layer(x, "b").sum(), weight)
    add_zero_of_skipped_modules(layer)
    torch.compiler.reset()
    torch.compile(layer, backend="eager", fullgraph=True)(x, "b").sum().backward()
    assert torch.equal(weight.grad, *expected)
    assert all(p.grad is not None and not p.grad.any() for name in "ac" for p in layer.experts[name].parameters())


def gradients_on_ranks(choices):
    state = init_parallel_state(device_type="cpu")
    torch.manual_seed(0)
    model = Layer()
    fully_shard(model, mesh=state.mesh["dp_shard"])
    add_zero_of_skipped_modules(model)
    found = []
    for chosen in choices:
        model.zero_grad()
        model(torch.randn(2, 3), chosen[state.rank]).sum().backward()
        opslot.drop_gradients_of_unused_modules(model)
        found.append([name for name in "abc" if model.experts[name].weight.grad is not None])
    return found


def test_experts_that_no_rank_uses_get_no_gradient(ranks):
    """As in one process; with zeros, AdamW would decay them and move them by their momentum."""
    expected = [["a", "b"], ["c"], ["a", "b"]]
    assert ranks.run(gradients_on_ranks, ["ab", "cc", "ba"]) == [expected] * 2


class Stages(nn.Module):
    """Calls what its stages hold, as the encoder of Emu3's image tokenizer does."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(nn.ModuleDict({"block": nn.Linear(3, 3)}) for _ in range(2))

    def forward(self, x):
        for stage in self.down:
            x = stage["block"](x)
        return x


def on_ranks_with_groups_inside():
    state = init_parallel_state(device_type="cpu")
    torch.manual_seed(0)
    model = Stages()
    for stage in model.down:
        fully_shard(stage["block"], mesh=state.mesh["dp_shard"])
    fully_shard(model, mesh=state.mesh["dp_shard"])
    add_zero_of_skipped_modules(model)
    model(torch.ones(1, 3)).sum().backward()
    return [parameter.grad.full_tensor().tolist() for parameter in model.parameters()]


def test_modules_with_groups_inside_are_not_skipped(ranks):
    torch.manual_seed(0)
    model = Stages()
    model(torch.ones(1, 3)).sum().backward()
    for found in ranks.run(on_ranks_with_groups_inside):
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(gradient), parameter.grad)
