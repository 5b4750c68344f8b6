"""All parameters on each rank (DDP): the same numbers as one process, without FSDP2."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

import opslot
from opslot._base.errors import ConfigError, ParallelError
from opslot.distributed import ParallelState, gradient_sync, init_parallel_state
from opslot.distributed import fsdp as fsdp_module
from opslot.distributed.gradient_buckets import GradientBuckets
from opslot.distributed.mixed_precision import has_copies, replicate
from tests.distributed import tiny

BF16 = torch.bfloat16
DDP = {"data_parallel_mode": "ddp"}


def on_ranks(name, sizes, kwargs):
    return tiny.train(name, sizes, **kwargs)


def check(ranks, name="qwen3", sizes=None, options=None, **kwargs):
    expected = torch.tensor(tiny.train(name, **kwargs))
    assert expected[0, 1] > 1e-2
    for found in ranks.run(on_ranks, name, sizes or {}, {**kwargs, "options": DDP | (options or {})}):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_equals_one_process(ranks, micro_batches):
    check(ranks, micro_batches=micro_batches, max_norm=0.5)


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_activation_checkpointing(ranks, checkpointing):
    check(ranks, micro_batches=4, options={"activation_checkpointing": checkpointing})


def test_sequence_parallelism(ranks):
    check(ranks, sizes={"sp": 2}, micro_batches=2)


def test_experts_with_auxiliary_loss(ranks):
    check(ranks, "qwen3_moe", micro_batches=4, ops="auto", aux_loss=True)


def test_tied_embeddings(ranks):
    check(ranks, micro_batches=4, changes={"tie_word_embeddings": True})


@pytest.mark.slow
def test_compiled_layers(ranks):
    check(ranks, steps=2, micro_batches=2, options={"compile": True})


def is_freed(sizes, options):
    state = init_parallel_state(device_type="cpu", **sizes)
    model = opslot.parallelize(tiny.build("qwen3_moe"), state, **options, param_dtype=BF16)
    batch = {name: value[state.dp_rank :: 2] for name, value in tiny.rows(0).items()}
    model(**batch, use_cache=False, num_items_in_batch=torch.tensor(9)).loss.backward()
    reference = weakref.ref(model.model.layers[0].mlp.experts)
    del model
    gc.collect()
    return reference() is None


@pytest.mark.parametrize(("sizes", "options"), [({}, DDP), ({"ep": 2}, {})], ids=["ddp", "ep"])
def test_deleted_model_is_freed(ranks, sizes, options):
    assert all(ranks.run(is_freed, sizes, options))


def both_modes(kwargs):
    found = []
    for mode in ("ddp", "fsdp2"):
        found.append(tiny.train("qwen3", {}, **kwargs, options={"data_parallel_mode": mode, "param_dtype": BF16}))
    return found


def test_the_same_mixed_precision_as_fsdp(ranks):
    """Gradients of one backward pass are summed in float32; those of several, in another order."""
    for ddp, fsdp in ranks.run(both_modes, {"steps": 3, "micro_batches": 2, "lr": 1e-3}):
        torch.testing.assert_close(torch.tensor(ddp), torch.tensor(fsdp), rtol=1e-5, atol=0)


def gradients_of_micro_batches(dtype, reentrant):
    """Gradients after two micro batches, the first of which is not reduced, and whether they were None until then."""
    state = init_parallel_state(device_type="cpu")
    model = opslot.parallelize(tiny.build("qwen3"), state, **DDP, param_dtype=dtype)
    assert has_copies(model)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    if reentrant:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    model.train()
    hidden = None
    for number in range(2):
        whole = tiny.rows(number)
        batch = {name: value[state.dp_rank :: 2] for name, value in whole.items()}
        count = (whole["labels"][:, 1:] != -100).sum()
        with gradient_sync(model, number == 1):
            model(**batch, use_cache=False, num_items_in_batch=count).loss.backward()
        hidden = hidden or [p.grad is None for p in model.parameters()]
    return tiny.gradients(model), all(hidden)


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant checkpoints"])
def test_accumulated_gradients(ranks, reentrant):
    model = tiny.build("qwen3")
    for number in range(2):
        model(**tiny.rows(number), use_cache=False).loss.backward()
    results = ranks.run(gradients_of_micro_batches, None, reentrant)
    assert all(hidden for _, hidden in results)
    tiny.assert_gradients_close([found for found, _ in results], tiny.gradients(model))


class Parts(nn.Module):
    """Two parts, of which a forward pass runs those that its arguments name; and one that is never run."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, used):
        return sum((self.parts[i](x) for i in used), x).square().sum()


def uneven(steps, dtype):
    """Gradients by step; `steps` are the parts that each rank uses, None for no backward pass at all."""
    state = init_parallel_state(device_type="cpu")
    model = Parts()
    replicate(model, dtype)
    found = []
    for used in steps:
        own = used[state.rank]
        with gradient_sync(model, True):
            if own is not None:
                model(torch.full((2, 3), 1.0 + state.rank), own).backward()
        found.append([None if p.grad is None else p.grad.tolist() for p in model.parameters()])
        model.zero_grad()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_ranks_that_lack_gradients(ranks, dtype):
    steps = [((0, 1), (0, 1)), ((0, 1), (0,)), ((1,), (0,)), ((0,), None), ((0, 1), (0, 1))]
    results = ranks.run(uneven, steps, dtype)
    assert results[0] == results[1]
    for used, found in zip(steps, results[0], strict=True):
        alone = Parts().to(dtype)
        expected = [None] * 6
        for rank, own in enumerate(used):
            if own is not None:
                alone(torch.full((2, 3), 1.0 + rank, dtype=dtype), own).backward()
            for i, parameter in enumerate(alone.parameters()):
                if parameter.grad is not None:
                    expected[i] = parameter.grad.float() + (0 if expected[i] is None else expected[i])
            alone.zero_grad()
        for grad, wanted in zip(found, expected, strict=True):
            assert (grad is None) == (wanted is None)
            if grad is not None:
                torch.testing.assert_close(torch.tensor(grad), wanted)


def sums_of_two_reductions():
    state = init_parallel_state(device_type="cpu")
    model = Parts()
    replicate(model, None)
    for _ in range(2):
        model(torch.full((2, 3), 1.0 + state.rank), (0, 1, 2)).backward()
    first = [p.grad.clone() for p in model.parameters()]
    # What is trained changes, and parameters move to other memory.
    model.parts[0].requires_grad_(False)
    model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)
    model.zero_grad()
    model(torch.full((2, 3), 1.0 + state.rank), (0, 1, 2)).backward()
    dist.barrier()
    model.parts[0].requires_grad_(True)
    second = [p.grad if p.grad is None else p.grad.tolist() for p in model.parameters()]
    model.zero_grad()
    model(torch.full((2, 3), 1.0 + state.rank), (0, 1, 2)).backward()
    return [g.tolist() for g in first], second, [p.grad.tolist() for p in model.parameters()]


def test_reduced_twice_and_other_trained_parameters(ranks):
    alone = Parts()
    for rank in range(2):
        alone(torch.full((2, 3), 1.0 + rank), (0, 1, 2)).backward()
    expected = [p.grad for p in alone.parameters()]
    for first, second, third in ranks.run(sums_of_two_reductions):
        for i, grad in enumerate(expected):
            torch.testing.assert_close(torch.tensor(first[i]), 2 * grad)
            assert (second[i] is None) == (i < 2)
            torch.testing.assert_close(torch.tensor(third[i]), grad)


def reuse_inside_a_checkpoint():
    init_parallel_state(device_type="cpu")
    layer = nn.Linear(3, 3, bias=False)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(checkpoint(self.layer, x, use_reentrant=True)).sum()

    model = Model()
    replicate(model, None)
    with pytest.raises(ParallelError, match="use_reentrant=False"):
        model(torch.ones(1, 3, requires_grad=True)).backward()
    return True


def train_a_layer_outside():
    state = init_parallel_state(device_type="cpu")
    model = opslot.parallelize(tiny.build("qwen3"), state, **DDP)
    hidden = model.model(input_ids=tiny.rows(0)["input_ids"], use_cache=False).last_hidden_state
    with pytest.raises(ParallelError, match="set data_parallel_mode to fsdp2"):
        model.lm_head(hidden).sum().backward()


def test_a_gradient_that_is_not_reduced_raises(ranks):
    ranks.run(train_a_layer_outside)


def raise_once():
    """Gradients after a backward pass that raised when some all-reduces had started."""
    state = init_parallel_state(device_type="cpu")
    monkeypatch = pytest.MonkeyPatch()
    # Every parameter has a bucket.
    monkeypatch.setattr("opslot.distributed.gradient_buckets._BUCKET_BYTES", 1)
    model = Parts()
    replicate(model, None)
    x = torch.full((2, 3), 1.0 + state.rank, requires_grad=True)

    def fail(gradient):
        raise ValueError

    handle = x.register_hook(fail)
    with pytest.raises(ValueError):
        model(x, (0, 1, 2)).backward()
    handle.remove()
    model(x, (0, 1, 2)).backward()
    monkeypatch.undo()
    return tiny.gradients(model)


def test_a_backward_pass_that_raised(ranks):
    alone = Parts()
    for rank in range(2):
        alone(torch.full((2, 3), 1.0 + rank), (0, 1, 2)).backward()
    tiny.assert_gradients_close(ranks.run(raise_once), tiny.gradients(alone))


def test_a_parameter_inside_and_outside_of_reentrant_checkpoints(ranks):
    ranks.run(reuse_inside_a_checkpoint)


def test_views_have_the_strides_of_their_parameters():
    leaf = nn.Parameter(torch.zeros(3, 5).t())
    gapped = nn.Parameter(torch.zeros(4, 8)[:, ::2])
    buckets = GradientBuckets([(p, p) for p in (leaf, gapped)], None, False)
    for p in (leaf, gapped):
        p.grad = torch.arange(float(p.numel())).view(p.shape)
    buckets.finish(reduce=False)
    views = buckets._buckets[0]._views
    assert views[1].stride() == leaf.stride()
    assert views[0].is_contiguous()
    for p, view in zip((gapped, leaf), views, strict=True):
        assert torch.equal(view, torch.arange(float(p.numel())).view(p.shape))


@pytest.mark.parametrize(
    ("sizes", "options", "found"),
    [
        ({"ep": 2}, {}, "ep=2"),
        ({"dp_replicate": 2}, {}, "dp_replicate=2"),
        ({}, {"cpu_offload": True}, "cpu_offload"),
        ({}, {"reshard_after_forward": False}, "reshard_after_forward=False"),
        ({}, {"copy_engine": True}, "copy_engine"),
    ],
)
def test_options_of_fsdp_raise(sizes, options, found):
    state = ParallelState(**{"dp_shard": 2, **sizes})
    with pytest.raises(ConfigError, match=f"{found}, which FSDP2 alone supports"):
        opslot.parallelize(nn.Linear(2, 2), state, **DDP, **options)


def test_unknown_mode_raises():
    with pytest.raises(ConfigError, match="use one of auto, ddp, fsdp2"):
        opslot.parallelize(nn.Linear(2, 2), data_parallel_mode="ddp2")


def test_auto_is_ddp_for_small_models_on_a_gpu(monkeypatch):
    memory = type("Properties", (), {"total_memory": 20 * 4 * 100})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    gpu = torch.device("cuda")
    model = nn.Linear(10, 10, bias=False)

    def needs_fsdp(device=gpu, dp_shard=2, ep=1, **options):
        return fsdp_module.needs_fsdp(model, ParallelState(dp_shard=dp_shard, ep=ep, device=device), **options)

    assert not needs_fsdp()
    assert not needs_fsdp(param_dtype=BF16, copy_engine=False)
    assert needs_fsdp(data_parallel_mode="fsdp2")
    assert needs_fsdp(device=torch.device("cpu"))
    assert needs_fsdp(ep=2)
    assert needs_fsdp(reshard_after_forward=False)
    model = nn.Linear(10, 11, bias=False)
    assert needs_fsdp(param_dtype=BF16)
    assert not needs_fsdp(data_parallel_mode="ddp")
    # Quantized weights are whole with FSDP2 too.
    model.load_weight = None
    assert not needs_fsdp(param_dtype=BF16)
    del model.load_weight
    # One process only holds the copies more than with FSDP2.
    assert not needs_fsdp(dp_shard=1, param_dtype=BF16)
