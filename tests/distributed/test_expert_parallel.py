"""Plans that name parameters, and experts on two ranks compared with one process."""

import inspect
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from opslot._base.errors import ConfigError
from opslot.distributed import ParallelPlan, init_parallel_state
from opslot.distributed.expert_parallel import ExpertParallel

HIDDEN, WIDTH = 6, 4


def experts(x, gate_up, down, index, weights):
    """The op's definition with local experts; indices of other experts are ignored."""
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
    index[1::4, 0] = total  # no expert
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
    ep = len(tokens_of_rank)
    state = init_parallel_state(device_type="cpu", ep=ep)
    rank = state.ep_rank
    p = problem(total, sum(tokens_of_rank), hit, top_k)
    inputs = ("x", "gate_up", "down", "weights")
    whole = {k: p[k].clone().requires_grad_() for k in inputs}
    expected = experts(whole["x"], whole["gate_up"], whole["down"], p["index"], whole["weights"])
    (expected * p["loss"]).sum().backward()

    first = sum(tokens_of_rank[:rank])
    rows = slice(first, first + tokens_of_rank[rank])
    mine = slice(rank * total // ep, (rank + 1) * total // ep)
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
def test_two_ranks_equal_one(ranks, total, tokens_of_rank, hit, top_k):
    assert max(ranks.run(parity, total, tokens_of_rank, hit, top_k)) < 1e-13


@pytest.mark.parametrize(
    ("total", "tokens_of_rank", "hit", "top_k"),
    [
        pytest.param(16, (9, 14, 3, 7), 16, 8, id="uneven"),
        pytest.param(8, (0, 12, 0, 5), 2, 2, id="all to the first rank, which brings nothing"),
        pytest.param(4, (0, 0, 0, 6), 1, 1, id="one expert gets all"),
    ],
)
def test_four_ranks_equal_one(ranks, total, tokens_of_rank, hit, top_k):
    assert max(ranks.run(parity, total, tokens_of_rank, hit, top_k, world=4)) < 1e-13


WEIGHTS = {
    "biased": {
        "gate_up_proj": (4, 8, 16),
        "down_proj": (4, 8, 8),
        "gate_up_proj_bias": (4, 16),
        "down_proj_bias": (4, 8),
    },
    "split": {"gate_proj": (4, 6, 8), "up_proj": (4, 6, 8), "down_proj": (4, 6, 8)},
    "transposed": {"gate_up_proj": (4, 8, 12), "down_proj": (4, 6, 8)},
    "ungated": {"up_proj": (4, 6, 8), "down_proj": (4, 8, 6)},
}


def variant_parity(variant_name, kernel, tokens_of_rank):
    """Largest error of the output and every gradient in fp32, over two ranks of ep with two experts each."""
    from opslot import KERNEL_REGISTRY

    state = init_parallel_state(device_type="cpu", ep=2)
    variant = KERNEL_REGISTRY.op("moe_experts").variant(variant_name)
    tokens, total = sum(tokens_of_rank), 4
    g = torch.Generator().manual_seed(tokens)
    randn = partial(torch.randn, generator=g)
    weights, index = torch.rand(tokens, total, generator=g).topk(2)
    whole = {"hidden_states": randn(tokens, 8), "top_k_weights": weights}
    whole |= {name: randn(*shape) for name, shape in WEIGHTS[variant_name].items()}
    loss = randn(tokens, 8)
    order = list(inspect.signature(variant.reference).parameters)
    bounds = {"limit": 1.0, "alpha": 1.702} if variant_name == "biased" else {}

    def run(function, at):
        leaves = {n: whole[n][at[n]].clone().requires_grad_() for n in whole}
        given = {**leaves, "top_k_index": index[at["hidden_states"]], **bounds}
        out = function(*(given[name] for name in order if name in given))
        (out * loss[at["hidden_states"]]).sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves.values())]

    everything = dict.fromkeys(whole, slice(None))
    expected = run(variant.reference, everything)
    rank = state.ep_rank
    rows = slice(sum(tokens_of_rank[:rank]), sum(tokens_of_rank[: rank + 1]))
    mine = slice(2 * rank, 2 * rank + 2)
    at = {n: rows if n in ("hidden_states", "top_k_weights") else mine for n in whole}
    got = run(ExpertParallel(KERNEL_REGISTRY.load("moe_experts", variant_name, kernel)), at)
    places = [rows, *at.values()]
    errors = [(a - b[place]).abs() for a, b, place in zip(got, expected, places, strict=True)]
    return max(e.max().item() for e in errors if e.numel())


@pytest.mark.quick("tokens_of_rank0-grouped_mm-*", "tokens_of_rank1-fused_triton-biased")
@pytest.mark.parametrize("variant", WEIGHTS)
@pytest.mark.parametrize("kernel", ["grouped_mm", "fused_triton"])
@pytest.mark.parametrize("tokens_of_rank", [(7, 4), (9, 0)])
def test_parameters_stay_with_their_expert(ranks, variant, kernel, tokens_of_rank):
    assert max(ranks.run(variant_parity, variant, kernel, tokens_of_rank)) < 1e-4


def dispatched_weights(dtype):
    """Dispatched routing weights and indices on this rank, compared with those on the ranks that sent them."""
    state = init_parallel_state(device_type="cpu", ep=2)
    p = problem(4, 12, 4, 3)
    rows = slice(5 * state.ep_rank, 5 + 7 * state.ep_rank)
    weights, index = p["weights"].to(dtype), p["index"]
    seen = {}

    def kernel(x, gate_up, down, local_index, local_weights):
        seen["weights"], seen["index"] = local_weights, local_index
        return x

    gate_up = torch.zeros(2, 2 * WIDTH, HIDDEN)
    ExpertParallel(kernel)(p["x"][rows], gate_up, torch.zeros(2, HIDDEN, WIDTH), index[rows], weights[rows])
    mine = (index // 2) == state.ep_rank
    arrived = sorted(zip(seen["index"].flatten().tolist(), seen["weights"].flatten().tolist(), strict=True))
    sent = sorted(zip((index[mine] % 2).tolist(), weights[mine].tolist(), strict=True))
    empty = [(2, 0.0)] * (len(arrived) - len(sent))
    return seen["weights"].dtype == dtype, arrived == [*sent, *empty]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_routing_weights_are_dispatched_unchanged(ranks, dtype):
    assert ranks.run(dispatched_weights, dtype) == [(True, True)] * 2


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


def test_plan_matches_parameters():
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
def test_plan_name_without_a_match_raises(name, message):
    with pytest.raises(ConfigError, match=message):
        plan(name).apply(Model())


def test_unknown_axis_raises():
    with pytest.raises(ConfigError, match="unknown axis tp"):
        ParallelPlan(extra_parallel_plan={"tp": {}})


@pytest.mark.parametrize("placement", [Shard(1), Replicate()])
def test_placement_other_than_dim_0_raises(placement):
    with pytest.raises(ConfigError, match=r"places a\.b as .*experts, which are dim 0\n  hint: set it to Shard\(0\)"):
        ParallelPlan(extra_parallel_plan={"ep": {"a.b": placement}})


def test_plan_of_a_wrapped_model():
    outer = nn.ModuleDict({"wrapped": Model()})
    names = ["wrapped.layers.0.experts.gate_up_proj", "wrapped.layers.1.experts.gate_up_proj"]
    assert sorted(plan().below("wrapped").match(outer)) == names
    assert plan().below("") == plan()


def applied(total):
    init_parallel_state(device_type="cpu", ep=2)
    model = Model(total)
    plan().apply(model)
    parameter = model.layers[1].experts.gate_up_proj
    return tuple(parameter.shape), parameter.to_local().tolist(), parameter.to_local().untyped_storage().nbytes()


def test_each_rank_keeps_only_its_experts(ranks):
    whole = torch.arange(16.0).view(4, 4).tolist()
    assert ranks.run(applied, 4) == [((4, 4), whole[:2], 32), ((4, 4), whole[2:], 32)]


def test_indivisible_experts_raise_with_fitting_sizes(ranks, rank_failed):
    with pytest.raises(rank_failed, match=r"ep=2 does not divide the 3 experts of layers.0.*\n  hint: use one of 1, 3"):
        ranks.run(applied, 3)
