"""The norm of gradients over all ranks, and clipping to it."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import opslot
from opslot._base.errors import ConfigError
from opslot.distributed import clip_grad_norm, init_parallel_state
from opslot.distributed.gradient_norm import clip_grad_norm_on_host
from tests.distributed import tiny
from tests.distributed.tiny import loss_of


def clipped(sizes, max_norm):
    """The norm that clip_grad_norm returned, and the norm of the full gradients afterwards."""
    state = init_parallel_state(device_type="cpu", **sizes)
    model = opslot.parallelize(tiny.build("qwen3_moe", "auto"), state)
    loss_of(model, state).backward()
    found = clip_grad_norm(model.parameters(), max_norm)
    grads = [p.grad.full_tensor() for p in model.parameters()]
    return found.item(), torch.stack([g.norm() for g in grads]).norm().item()


@pytest.mark.quick("sizes2", "sizes3")
@pytest.mark.parametrize("sizes", [{}, {"ep": 2}, {"sp": 2, "ep": 2}, {"dp_replicate": 2}])
def test_clip_grad_norm_over_all_ranks(ranks, sizes):
    model = tiny.build("qwen3_moe", "auto")
    loss_of(model, opslot.distributed.ParallelState()).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert expected > 1
    for found, after in ranks.run(clipped, sizes, 0.5):
        assert found == pytest.approx(expected, rel=1e-5)
        assert after == pytest.approx(0.5, rel=1e-5)
    for found, after in ranks.run(clipped, sizes, float("inf")):
        assert after == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_large_gradients(dtype):
    """In one sum of float32, that of five million elements was off by 1e-4."""
    parameter = torch.nn.Parameter(torch.empty(2_500, 2_000, dtype=dtype))
    parameter.grad = torch.randn(2_000, 2_500, generator=torch.Generator().manual_seed(0)).to(dtype).T
    found = clip_grad_norm([parameter], math.inf).item()
    assert found == pytest.approx(parameter.grad.double().norm().item(), rel=2e-6)


def test_clip_grad_norm_of_plain_tensors_and_of_none():
    parameter = nn.Parameter(torch.zeros(2))
    assert clip_grad_norm([parameter], 1.0) == 0
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm([parameter], 1.0) == 5
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))
    assert clip_grad_norm(parameter, 1.0) == pytest.approx(1.0)


@pytest.mark.parametrize("max_norm", [1.0, 4.999999, 5.0, 5.00001, math.inf])
def test_clip_grad_norm_on_host_equals_that_on_the_device(max_norm):
    one, other = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    one.grad, other.grad = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])
    version = one.grad._version
    assert clip_grad_norm_on_host([one], max_norm) == clip_grad_norm([other], max_norm).item() == 5
    assert torch.equal(one.grad, other.grad)
    # Gradients within max_norm are not written.
    assert (one.grad._version == version) is (max_norm > 5)
    assert clip_grad_norm_on_host([nn.Parameter(torch.zeros(2))], max_norm) == 0


def test_clip_grad_norm_on_host_of_nan():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([math.nan, 4.0])
    assert math.isnan(clip_grad_norm_on_host([parameter], 1.0))
    assert parameter.grad.isnan().all()


@pytest.mark.parametrize("limit", [-1.0, math.nan])
def test_invalid_max_norm_raises(limit):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(ConfigError, match=f"max_norm={limit} must be at least 0"):
        clip_grad_norm([parameter], limit)
    assert parameter.grad.tolist() == [1.0, 1.0]


def norms_of_16_bits(dtype, value):
    state = init_parallel_state(device_type="cpu")
    wide = nn.Parameter(torch.zeros(3))
    wide.grad = torch.full((3,), value)
    narrow = nn.Parameter(distribute_tensor(torch.zeros(301, dtype=dtype), state.fsdp_mesh, [Shard(0)]))
    narrow.grad = distribute_tensor(torch.full((301,), value, dtype=dtype), state.fsdp_mesh, [Shard(0)])
    found = clip_grad_norm([narrow, wide], 1.0).item()
    return found, narrow.grad.dtype, narrow.grad.full_tensor().float().norm().item()


@pytest.mark.parametrize(("dtype", "value"), [(torch.bfloat16, 1.015625), (torch.float16, 6e4)])
def test_norm_of_16_bit_gradients_is_float32(ranks, dtype, value):
    """bfloat16 would have an error of half a percent, and float16 would overflow."""
    for found, stored, after in ranks.run(norms_of_16_bits, dtype, value):
        assert found == pytest.approx(value * math.sqrt(304), rel=1e-5)
        assert stored is dtype
        assert after == pytest.approx(math.sqrt(301 / 304), rel=4e-3)


def norm_of_strided_shards():
    from torch.distributed.tensor.placement_types import _StridedShard

    state = init_parallel_state(device_type="cpu")
    whole = nn.Parameter(DTensor.from_local(torch.zeros(4), state.fsdp_mesh, [_StridedShard(0, split_factor=2)]))
    local = torch.full((4,), 3.0 + state.rank)
    whole.grad = DTensor.from_local(local, state.fsdp_mesh, [_StridedShard(0, split_factor=2)])
    return clip_grad_norm([whole], math.inf).item()


def test_norm_counts_strided_shards_of_all_ranks(ranks):
    """FSDP2 makes them of parameters that tensor parallelism has sharded; torch does not call them shards."""
    assert ranks.run(norm_of_strided_shards) == [pytest.approx(10.0)] * 2


def norm_with_value(value):
    """The norm if one rank's shard of one gradient contains `value`."""
    state = init_parallel_state(device_type="cpu")
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(3)]
    for layer in layers:
        fully_shard(layer, mesh=state.fsdp_mesh)
    # The last layer has no gradient.
    layers[1](layers[0](torch.ones(2, 4))).sum().backward()
    parameters = [p for layer in layers for p in layer.parameters()]
    if value is not None and state.rank == 1:
        parameters[0].grad.to_local()[0, 0] = value
    return clip_grad_norm(parameters, math.inf).item()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_gradient_on_one_rank_is_in_the_norm(ranks, value):
    assert ranks.run(norm_with_value, value) == pytest.approx([value] * 2, nan_ok=True)
    assert all(0 < found < math.inf for found in ranks.run(norm_with_value, None))


def norm_with_an_empty_shard():
    """The norm of gradients whose shard on the second rank is empty."""
    state = init_parallel_state(device_type="cpu")
    torch.manual_seed(0)
    layer = fully_shard(nn.Linear(4, 1), mesh=state.fsdp_mesh)
    layer(torch.tensor([[3.0, -4.0, 0.0, 0.5]])).sum().backward()
    assert state.rank == 0 or layer.weight.grad.to_local().numel() == 0
    return clip_grad_norm(layer.parameters(), math.inf).item()


def test_clip_grad_norm_with_an_empty_shard(ranks):
    assert ranks.run(norm_with_an_empty_shard) == pytest.approx([math.sqrt(26.25)] * 2)
