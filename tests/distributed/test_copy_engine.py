"""Copy-engine collectives of FSDP: training equals that with the process group's collectives.

Memory-mapped files replace the memory of peer GPUs; `test_multigpu.py` runs the same on GPUs.
"""

import contextlib
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from opslot._base.errors import ConfigError
from opslot.distributed import copy_engine, gradient_sync, init_parallel_state, shard_model
from tests.distributed import tiny


class MappedMemory:
    """One file per rank, mapped by all ranks."""

    def __init__(self, size, group, device):
        self._group = group
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder, dist.get_global_rank(group, 0), group=group)
        files = [Path(folder[0], str(rank)) for rank in range(group.size())]
        files[group.rank()].write_bytes(bytes(size))
        dist.barrier(group)
        self.buffers = [torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8) for file in files]

    def barrier(self):
        dist.barrier(self._group)


@contextlib.contextmanager
def mapped_memory(buffer_bytes=1000):
    """Copy through mapped files, in parts; yields the dtypes in which gradients are sent."""
    sent = []
    send = copy_engine.CopyReduceScatter.__call__

    def recording(self, output_tensor, input_tensor, *rest, **options):
        sent.append(input_tensor.dtype)
        return send(self, output_tensor, input_tensor, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_engine, "_BUFFER_BYTES", buffer_bytes)
        patch.setattr(copy_engine, "SharedMemory", MappedMemory)
        patch.setattr(copy_engine, "obstacle_to_copies", lambda group, device: None)
        patch.setattr(copy_engine.CopyReduceScatter, "__call__", recording)
        yield sent


def gradients_without_and_with_copies(name, sizes, options, kwargs):
    expected = tiny.train(name, sizes, options={**options, "copy_engine": False}, **kwargs)
    with mapped_memory() as sent:
        found = tiny.train(name, sizes, options={**options, "copy_engine": True}, **kwargs)
    return found, expected, sent


BF16 = {"param_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("world", "name", "sizes", "options", "kwargs"),
    [
        pytest.param(2, "qwen3", {}, {}, {}, marks=pytest.mark.slow),
        (2, "qwen3", {}, BF16, {"micro_batches": 4}),
        pytest.param(3, "qwen3", {}, {"reshard_after_forward": False}, {"micro_batches": 3}, marks=pytest.mark.slow),
        (2, "qwen3_moe", {"ep": 2}, BF16, {"aux_loss": True, "micro_batches": 2}),
        pytest.param(4, "qwen3_moe", {"ep": 2}, {"prefetch": 2}, {"micro_batches": 4}, marks=pytest.mark.slow),
        pytest.param(4, "qwen3", {"dp_replicate": 2}, BF16, {"micro_batches": 4}, marks=pytest.mark.slow),
        pytest.param(4, "qwen3", {"sp": 2}, {"prefetch": 0}, {"micro_batches": 4}, marks=pytest.mark.slow),
    ],
)
def test_training_with_copies_equals_training_with_gloo(ranks, world, name, sizes, options, kwargs):
    kwargs = {"steps": 3, "micro_batches": world, **kwargs}
    for found, expected, sent in ranks.run(
        gradients_without_and_with_copies, name, sizes, options, kwargs, world=world
    ):
        assert sent
        # A sum over two ranks has only one order.
        exact = world == 2
        torch.testing.assert_close(
            torch.tensor(found, dtype=torch.float64),
            torch.tensor(expected, dtype=torch.float64),
            rtol=0 if exact else 1e-5,
            atol=0,
        )


def gradients(accumulated):
    """Gradients without and with copies, and the dtypes in which the latter were sent."""
    state = init_parallel_state(device_type="cpu")
    found = []
    for engine in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        with mapped_memory() as sent:
            shard_model(model, state, layers=["Linear"], param_dtype=torch.bfloat16, copy_engine=engine)
            for i in range(accumulated):
                with gradient_sync(model, i == accumulated - 1):
                    model(torch.randn(5, 8)).square().sum().backward()
            found.append([p.grad.full_tensor().tolist() for p in model.parameters()])
            model.zero_grad()
            # These reductions must be sums.
            model(torch.ones(5, 8)).sum().backward()
    return *found, sent


@pytest.mark.parametrize("accumulated", [1, 3])
def test_single_pass_gradients_are_sent_in_param_dtype(ranks, accumulated):
    for expected, found, sent in ranks.run(gradients, accumulated):
        own = torch.bfloat16 if accumulated == 1 else torch.float32
        assert sent == [own, own, torch.float32, torch.float32]
        assert found == expected


def in_one_rank(in_place):
    """Gradients summed over two passes, and addresses of what the reductions allocated."""
    state = init_parallel_state(device_type="cpu", group_of_one=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    options = {"param_dtype": torch.bfloat16, "data_parallel_mode": "fsdp2"}
    with contextlib.nullcontext() if in_place else mock.patch.object(copy_engine, "InPlaceReduction", Copying):
        shard_model(model, state, layers=["Linear"], **options)
    allocated = []
    allocate = copy_engine.InPlaceReduction.allocate

    def recording(self, *args, **kwargs):
        allocated.append(allocate(self, *args, **kwargs))
        return allocated[-1]

    with mock.patch.object(copy_engine.InPlaceReduction, "allocate", recording):
        for i in range(2):
            with gradient_sync(model, i == 1):
                model(torch.randn(5, 8)).square().sum().backward()
    return [p.grad.full_tensor().tolist() for p in model.parameters()], [x.data_ptr() for x in allocated]


class Copying(copy_engine.InPlaceReduction):
    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)


def test_one_rank_reduces_in_place(ranks):
    (expected, none), (found, allocated) = (ranks.run(in_one_rank, value, world=1)[0] for value in (False, True))
    assert found == expected
    assert not none
    # For each of two layers, the input of the reduction and its output.
    assert len(allocated) == 4
    assert allocated[::2] == allocated[1::2]
    assert allocated[0] != allocated[2]


def error_messages():
    state = init_parallel_state(device_type="cpu")
    try:
        shard_model(nn.Sequential(nn.Linear(8, 8)), state, layers=["Linear"], copy_engine=True)
    except ConfigError as error:
        return str(error)


def test_unavailable_copies_raise_if_requested(ranks):
    for message in ranks.run(error_messages):
        assert "fsdp.copy_engine is on, but the model runs on cpu, and copies need GPUs" in message
        assert "hint: remove it to use the collectives of the process group" in message


def ring():
    """Consecutive transfers of growing and shrinking sizes without a wait between them; returns the wrong results."""
    device = init_parallel_state(device_type="cpu").device
    group = dist.group.WORLD
    rank, world = group.rank(), group.size()
    gather, reduce = copy_engine.CopyAllGather(group, device), copy_engine.CopyReduceScatter(group, device)
    wrong = []
    with mapped_memory(buffer_bytes=4096):
        for index, count in enumerate([5, 300, 7, 1 << 14, 3, 3, 3, 0, 1024]):
            own = torch.arange(count, dtype=torch.float32) + 1000 * rank + index
            whole = gather.allocate((count * world,), dtype=own.dtype, device=device)
            gather(whole, own, group)
            expected = torch.cat([torch.arange(count) + 1000.0 * other + index for other in range(world)])
            if not torch.equal(whole, expected):
                wrong.append(("gather", index))
            sums = reduce.allocate((count,), dtype=torch.float32, device=device)
            reduce(sums, expected * (rank + 1), group, dist.ReduceOp.SUM)
            if not torch.equal(sums, own * sum(range(1, world + 1))):
                wrong.append(("reduce", index))
    return wrong


@pytest.mark.parametrize("world", [2, 4])
def test_transfers_of_any_size(ranks, world):
    assert ranks.run(ring, world=world) == [[]] * world


def log_on_cpu():
    """What is logged of copies for a model on the CPU, whose collectives are not NCCL's."""
    state = init_parallel_state(device_type="cpu")
    with mock.patch.object(copy_engine.logger, "info") as log:
        shard_model(nn.Sequential(nn.Linear(8, 8)), state, layers=["Linear"])
    return [call.args for call in log.call_args_list]


def test_a_model_on_the_cpu_is_not_said_to_use_nccl(ranks):
    assert ranks.run(log_on_cpu) == [[], []]
