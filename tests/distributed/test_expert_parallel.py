"""Plans that name parameters, and experts on two ranks against one process."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from opslot._base.errors import ConfigError
from opslot.distributed import ParallelPlan, init_parallel_state
from opslot.distributed.expert_parallel import ExpertParallel

HIDDEN, WIDTH = 6, 4


def experts(x, gate_up, down, index, weights):
    """The op's definition, over local experts; indices that are none of them add nothing."""
    assert len(x), "a kernel is not called without tokens"
    out = torch.zeros_like(x)
    for e in range(len(gate_up)):
        token, choice = torch.where(index == e)
        gate, up = (x[token] @ gate_up[e].T).chunk(2, -1)
        out = out.index_add(0, token, (nn.functional.silu(gate) * up) @ down[e].T * weights[token, choice, None])
    return out


def problem(total, tokens, hit, top_k=2):
    g = torch.Generator().manual_seed(total + tokens)
    scores = torch.rand(tokens, total, generator=g, dtype=torch.float64)
    scores[:, hit:] = 0
    weights, index = scores.topk(top_k, -1)
    index[1::4, 0] = total  # no expert at all
    return {
        "x": torch.randn(tokens, HIDDEN, generator=g, dtype=torch.float64),
        "gate_up": torch.randn(total, 2 * WIDTH, HIDDEN, generator=g, dtype=torch.float64),
        "down": torch.randn(total, HIDDEN, WIDTH, generator=g, dtype=torch.float64),
        "index": index,
        "weights": weights,
        "loss": torch.randn(tokens, HIDDEN, generator=g, dtype=torch.float64),
    }


def parity(total, tokens_of_rank, hit, top_k=2, as_dtensor=False):
    """Largest error of the output and of the gradients of tokens, weights and this rank's experts."""
    state = init_parallel_state(device_type="cpu", ep=2)
    rank = state.ep_rank
    p = problem(total, sum(tokens_of_rank), hit, top_k)
    inputs = ("x", "gate_up", "down", "weights")
    whole = {k: p[k].clone().requires_grad_() for k in inputs}
    expected = experts(whole["x"], whole["gate_up"], whole["down"], p["index"], whole["weights"])
    (expected * p["loss"]).sum().backward()

    first = sum(tokens_of_rank[:rank])
    rows = slice(first, first + tokens_of_rank[rank])
    mine = slice(rank * total // 2, (rank + 1) * total // 2)
    place = {"x": rows, "weights": rows, "gate_up": mine, "down": mine}
    local = {k: p[k][place[k]].clone().requires_grad_() for k in inputs}
    arguments = dict(local)
    if as_dtensor:
        for k in ("gate_up", "down"):
            arguments[k] = DTensor.from_local(local[k], state.ep_mesh, [Shard(0)], run_check=False)
    run = ExpertParallel(experts)
    out = run(arguments["x"], arguments["gate_up"], arguments["down"], p["index"][rows], arguments["weights"])
    (out * p["loss"][rows]).sum().backward()
    errors = [(out - expected[rows]).abs()] + [(local[k].grad - whole[k].grad[place[k]]).abs() for k in inputs]
    return max(e.max().item() for e in errors if e.numel())


@pytest.mark.parametrize(
    ("total", "tokens_of_rank", "hit", "top_k"),
    [
        pytest.param(4, (9, 9), 4, 2, id="balanced"),
        pytest.param(8, (13, 5), 8, 3, id="uneven"),
        pytest.param(4, (7, 7), 2, 2, id="second rank's experts get nothing"),
        pytest.param(4, (11, 0), 4, 2, id="second rank brings nothing"),
        pytest.param(4, (6, 0), 2, 1, id="second rank idle"),
        pytest.param(2, (5, 8), 2, 2, id="every expert"),
        pytest.param(16, (20, 11), 16, 5, id="several rows to a rank"),
        pytest.param(16, (20, 11), 8, 6, id="all to one rank, three rows a token"),
    ],
)
def test_two_ranks_compute_what_one_does(ranks, total, tokens_of_rank, hit, top_k):
    assert max(ranks.run(parity, total, tokens_of_rank, hit, top_k)) < 1e-13


def test_weights_may_be_dtensors(ranks):
    assert max(ranks.run(parity, 4, (9, 4), 4, 2, True)) < 1e-13


def test_one_process_calls_the_kernel():
    p = problem(4, 5, 4)
    arguments = (p["x"], p["gate_up"], p["down"], p["index"], p["weights"])
    assert torch.equal(ExpertParallel(experts)(*arguments), experts(*arguments))


class Block(nn.Module):
    def __init__(self, total):
        super().__init__()
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.arange(total * 4.0).view(total, 4))
        self.gate = nn.Linear(2, 2)


class Model(nn.Module):
    def __init__(self, total=4):
        super().__init__()
        self.layers = nn.ModuleList([Block(total), Block(total)])


def plan(name="layers.*.experts.gate_up_proj"):
    return ParallelPlan(extra_parallel_plan={"ep": {name: Shard(0)}})


def test_a_plan_finds_its_parameters():
    assert sorted(plan().match(Model())) == ["layers.0.experts.gate_up_proj", "layers.1.experts.gate_up_proj"]
    assert plan().apply(Model()) == ["layers.0.experts", "layers.1.experts"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.*.experts.gate_up_proj", "the model has e.g. layers.0.experts.gate_up_proj"),
        ("layers.*.gate_up_proj", "the model has e.g. layers.0.experts.gate_up_proj"),
        ("layers.*.experts.up_proj", "nothing ends in up_proj"),
    ],
)
def test_a_name_that_matches_nothing_is_an_error(name, message):
    with pytest.raises(ConfigError, match=message):
        plan(name).apply(Model())


def test_an_unknown_axis_is_an_error():
    with pytest.raises(ConfigError, match="names the axis tp"):
        ParallelPlan(extra_parallel_plan={"tp": {}})


def applied(total):
    init_parallel_state(device_type="cpu", ep=2)
    model = Model(total)
    plan().apply(model)
    parameter = model.layers[1].experts.gate_up_proj
    return tuple(parameter.shape), parameter.to_local().tolist(), parameter.to_local().untyped_storage().nbytes()


def test_each_rank_keeps_its_experts_and_frees_the_others(ranks):
    whole = torch.arange(16.0).view(4, 4).tolist()
    assert ranks.run(applied, 4) == [((4, 4), whole[:2], 32), ((4, 4), whole[2:], 32)]


def test_experts_that_do_not_divide_name_sizes_that_would(ranks, rank_failed):
    with pytest.raises(rank_failed, match=r"ep=2 does not divide the 3 experts of layers.0.*would: 1, 3"):
        ranks.run(applied, 3)
