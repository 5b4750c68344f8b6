"""Linear attention on two sequence-parallel ranks compared with one process."""

import pytest
import torch

import opslot
from opslot.distributed import (
    ShardedConvolution,
    UlyssesDeltaRule,
    UlyssesScan,
    init_parallel_state,
    shard_sequence,
)
from opslot.ops.causal_conv1d.op import reference as convolve
from opslot.ops.chunk_gated_delta_rule.op import reference as delta_rule
from opslot.ops.mamba_chunk_scan.op import reference as scan
from opslot.verify.random_model import random_model
from opslot.verify.tiny import tiny_config
from tests.distributed import tiny
from tests.models.sizes import MIXED

LINEAR = MIXED | {"pad_token_id": 0}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parity(function, sharded, inputs, shared, dim, **options):
    """Largest error of the output and of each gradient; `inputs` are sharded along `dim`, `shared` are parameters."""
    rank = init_parallel_state(device_type="cpu", sp=2).sp_rank
    whole = {name: x.clone().requires_grad_() for name, x in {**inputs, **shared}.items()}
    expected = function(**whole, **options)
    weight = random(*expected.shape, seed=99)
    (expected * weight).sum().backward()
    local = {name: x.chunk(2, dim)[rank].clone().requires_grad_() for name, x in inputs.items()}
    own = {name: x.clone().requires_grad_() for name, x in shared.items()}
    found = sharded(**local, **own, **options)
    (found * weight.chunk(2, dim)[rank]).sum().backward()
    errors = [found - expected.chunk(2, dim)[rank]]
    errors += [x.grad - whole[name].grad.chunk(2, dim)[rank] for name, x in local.items()]
    for name, x in own.items():
        torch.distributed.all_reduce(x.grad)
        errors.append(x.grad - whole[name].grad)
    return max(error.abs().max().item() for error in errors)


def convolution(length, documents, width=4):
    inputs = {"hidden_states": random(2, length, 6).transpose(1, 2)}
    shared = {"weight": random(6, width, seed=1), "bias": random(6, seed=2)}
    bounds = None if documents is None else torch.tensor([0, *documents]).cumsum(0)
    return parity(convolve, ShardedConvolution(convolve), inputs, shared, 2, activation="silu", cu_seqlens=bounds)


@pytest.mark.parametrize(
    ("length", "documents", "width"),
    [
        (10, None, 4),
        # A window that reaches further than the rank before this one.
        (4, None, 4),
        (10, None, 1),
        (10, [10, 10], 4),
        # Boundaries in the first tokens of the second rank, at the start of its shard, and before it.
        (10, [6, 4, 5, 5], 4),
        (10, [3, 1, 6, 1, 1, 8], 4),
        (4, [1, 3, 2, 0, 2], 4),
    ],
)
def test_convolution_over_the_global_sequence(ranks, length, documents, width):
    assert max(ranks.run(convolution, length, documents, width)) < 1e-13


def first(function):
    return lambda **arguments: function(**arguments)[0]


def recurrence(k_heads, heads, documents):
    inputs = {
        "query": random(2, 10, k_heads, 5),
        "key": random(2, 10, k_heads, 5, seed=1),
        "value": random(2, 10, heads, 3, seed=2),
        "g": torch.nn.functional.logsigmoid(random(2, 10, heads, seed=3)),
        "beta": random(2, 10, heads, seed=4).sigmoid(),
    }
    bounds = None if documents is None else torch.tensor([0, *documents]).cumsum(0)
    options = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": bounds}
    return parity(first(delta_rule), first(UlyssesDeltaRule(delta_rule)), inputs, {}, 1, **options)


@pytest.mark.parametrize(("k_heads", "heads"), [(2, 4), (2, 2), (1, 2), (1, 4)])
def test_delta_rule_over_the_global_sequence(ranks, k_heads, heads):
    assert max(ranks.run(recurrence, k_heads, heads, None)) < 1e-13


@pytest.mark.parametrize("documents", [[10, 10], [7, 3, 5, 5], [3, 1, 6, 1, 9]])
def test_delta_rule_of_packed_documents(ranks, documents):
    assert max(ranks.run(recurrence, 2, 4, documents)) < 1e-13


def states():
    """The last states of all heads, from given first states."""
    rank = init_parallel_state(device_type="cpu", sp=2).sp_rank
    inputs = [random(2, 10, heads, 4, seed=heads + n) for n, heads in enumerate((2, 2, 4))]
    gates = [random(2, 10, 4, seed=n).sigmoid() * sign for n, sign in ((5, -1), (6, 1))]
    start = random(2, 4, 4, 4, seed=7)
    expected = delta_rule(*inputs, *gates, start, True, True)[1]
    local = [x.chunk(2, 1)[rank] for x in (*inputs, *gates)]
    return (UlyssesDeltaRule(delta_rule)(*local, start, True, True)[1] - expected).abs().max().item()


def test_states_have_all_heads(ranks):
    assert max(ranks.run(states)) < 1e-13


def scanned(groups, heads, documents):
    inputs = {
        "x": random(2, 10, heads, 3),
        "dt": random(2, 10, heads, seed=1),
        "B": random(2, 10, groups, 5, seed=2),
        "C": random(2, 10, groups, 5, seed=3),
    }
    shared = {"A": -random(heads, seed=4).exp(), "D": random(heads, seed=5), "dt_bias": random(heads, seed=6)}
    bounds = None if documents is None else torch.tensor([0, *documents]).cumsum(0)
    options = {"dt_softplus": True, "dt_limit": (0.1, 2.0), "cu_seqlens": bounds}
    return parity(scan, UlyssesScan(scan), inputs, shared, 1, **options)


@pytest.mark.parametrize(
    ("groups", "heads", "documents"), [(2, 4, None), (1, 4, [3, 1, 6, 1, 9]), (4, 4, [10, 10]), (3, 12, [7, 3, 5, 5])]
)
def test_scan_over_the_global_sequence(ranks, groups, heads, documents):
    assert max(ranks.run(scanned, groups, heads, documents)) < 1e-13


def scan_states():
    """The last states of all heads, from given first states."""
    rank = init_parallel_state(device_type="cpu", sp=2).sp_rank
    x, dt, b, c = random(2, 10, 4, 3), random(2, 10, 4).abs(), random(2, 10, 1, 5, seed=1), random(2, 10, 1, 5, seed=2)
    given = {"A": -random(4).abs(), "initial_states": random(2, 4, 3, 5, seed=7), "return_final_states": True}
    local = {"x": x, "dt": dt, "B": b, "C": c}
    expected = scan(**local, **given)
    found = UlyssesScan(scan)(**{name: tensor.chunk(2, 1)[rank] for name, tensor in local.items()}, **given)
    output = expected[0].chunk(2, 1)[rank]
    return max((found[0] - output).abs().max().item(), (found[1] - expected[1]).abs().max().item())


def test_scan_states_have_all_heads(ranks):
    assert max(ranks.run(scan_states)) < 1e-13


def on_ranks(name, sizes, kwargs):
    return tiny.train(name, sizes, **kwargs)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("qwen3_next", {"documents": (2, 7, 3)}),
        pytest.param("qwen3_next", {"length": 11, "ops": "auto"}, marks=pytest.mark.slow),
        pytest.param("olmo_hybrid", {"documents": (5, 1, 6), "ops": "auto"}, marks=pytest.mark.slow),
        ("olmo_hybrid", {"changes": {**LINEAR, "linear_num_key_heads": 1, "linear_allow_neg_eigval": False}}),
    ],
)
def test_training_equals_one_process(ranks, name, kwargs):
    kwargs = {"steps": 2, "micro_batches": 2, "changes": LINEAR, **kwargs}
    expected = torch.tensor(tiny.train(name, **kwargs))
    assert expected[0, 1] > 1e-2
    for found in ranks.run(on_ranks, name, {"sp": 2}, kwargs):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=0)


def indivisible():
    from opslot.models.parallelize import parallelize

    state = init_parallel_state(device_type="cpu", sp=2)
    changes = LINEAR | {"linear_num_key_heads": 1, "linear_num_value_heads": 3}
    parallelize(tiny.build("olmo_hybrid", **changes), state)


def indivisible_scan():
    import opslot
    from opslot.models.parallelize import parallelize
    from opslot.verify.random_model import random_model
    from opslot.verify.tiny import tiny_config

    config = tiny_config("nemotron_h")
    config.mamba_num_heads, config.n_groups = 3, 1
    model = random_model(config)
    opslot.apply(model)
    parallelize(model, init_parallel_state(device_type="cpu", sp=2))


def test_indivisible_heads_raise(ranks, rank_failed):
    with pytest.raises(rank_failed, match="sp=2 does not divide 3 value heads"):
        ranks.run(indivisible)


def test_indivisible_heads_of_a_scan_raise(ranks, rank_failed):
    with pytest.raises(rank_failed, match="sp=2 does not divide 3 scan heads"):
        ranks.run(indivisible_scan)


def caches():
    state = init_parallel_state(device_type="cpu", sp=2)
    config = tiny_config("qwen3_next")
    model = random_model(config)
    opslot.apply(model)
    opslot.parallelize(model, state)
    ids = torch.arange(5, 29)[None] % config.vocab_size
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    return model(**shard_sequence({"input_ids": ids, "position_ids": positions})).past_key_values is None


def test_documents_that_start_on_one_rank_make_no_cache(ranks):
    """The other rank made one, whose states it gathered alone."""
    assert ranks.run(caches, timeout=60) == [True, True]
