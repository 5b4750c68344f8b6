"""FSDP2's collectives within one host as copies between its GPUs, which use no SMs.

NCCL's kernels occupy SMs, and persistent GEMMs that use all SMs wait for them: with FSDP on four H200s the experts'
GEMMs took twice as long. Copies between GPUs run on copy engines; only a barrier and the sum of the received gradients
are kernels.

Gradients are sent in the dtype in which they were computed and accumulated in `reduce_dtype`: for bfloat16 gradients
accumulated in float32 that is half the bytes of a float32 reduce-scatter, with the same sum up to the order.
"""

from __future__ import annotations

import contextlib
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from opslot._base.device import has_package
from opslot._base.errors import ConfigError
from opslot._base.logging import get_logger
from opslot.distributed.consensus import gather_objects

logger = get_logger(__name__)

# Bytes per rank of one buffer: large enough that the barrier is cheap, and small compared with a layer.
_BUFFER_BYTES = 2**28
# A rank fills one buffer while others may still read the previous one; see `_Buffers`.
_TURNS = 2


class SharedMemory:
    """`size` bytes on each GPU of a group within one host, by torch's symmetric memory; all ranks create it together.

    Attributes:
        buffers: [size] uint8, by rank; each rank reads and writes all of them, and its own is on its device.
    """

    def __init__(self, size: int, group: ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        own = symmetric.empty(size, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(own, group.group_name)
        self.buffers = [self._handle.get_buffer(rank, (size,), torch.uint8) for rank in range(group.size())]
        _opened.add(self)

    def barrier(self) -> None:
        """On the current stream: wait until every rank's stream gets here."""
        self._handle.barrier(channel=0)


_opened: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


def opened_bytes() -> int:
    """Bytes on this rank's GPU that are shared with other ranks, which torch's memory statistics do not include."""
    return sum(memory.buffers[0].nbytes for memory in _opened)


class _Buffers:
    """Shared memory for one transfer after another.

    Two buffers alternate, and each transfer has one barrier, between writing and reading. After the barrier of a
    transfer all ranks have finished the previous one, whose buffer is used next.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._turn = 0
        self._memory: list[SharedMemory] = []
        self._done: torch.cuda.Event | None = None

    def next(self) -> SharedMemory:
        """The buffer of the next transfer."""
        if not self._memory:
            self._memory = [SharedMemory(_BUFFER_BYTES, self._group, self._device) for _ in range(_TURNS)]
        self._turn = (self._turn + 1) % _TURNS
        return self._memory[self._turn]

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Transfers started inside run after the previous ones, on whatever stream those were.

        FSDP gathers on its own stream or on the current one.
        """
        if self._device.type != "cuda":
            yield
            return
        stream = torch.cuda.current_stream()
        if self._done is not None:
            stream.wait_event(self._done)
        yield
        self._done = stream.record_event()


class CopyAllGather:
    """FSDP2's all-gather by copies; what `FSDPModule.set_custom_all_gather` takes."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._buffers = _Buffers(group, device)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` [ranks * n] with every rank's `input_tensor` [n], on the current stream."""
        rank, count = group.rank(), group.size()
        rows = output_tensor.view(count, input_tensor.numel())
        # FSDP may pass a view of the output.
        if rows[rank].data_ptr() != input_tensor.data_ptr():
            rows[rank].copy_(input_tensor)
        with self._buffers.in_turn():
            for part in _parts(input_tensor.numel(), _BUFFER_BYTES // input_tensor.element_size()):
                memory, own = self._buffers.next(), input_tensor[part]
                _rows(memory, rank, own)[0].copy_(own)
                memory.barrier()
                # Each rank starts with a different source, so that not all ranks read from one GPU at once.
                for other in ((rank + step) % count for step in range(1, count)):
                    rows[other, part].copy_(_rows(memory, other, own)[0])


class CopyReduceScatter:
    """FSDP2's summing reduce-scatter by copies and one local sum, in an order that is always the same.

    What `FSDPModule.set_custom_reduce_scatter` takes.

    Attributes:
        sent_dtype: dtype in which the gradients of a single backward pass are sent; see `gradient_sync`.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._buffers = _Buffers(group, device)
        self._gives_input = True
        self.sent_dtype: torch.dtype | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 allocates the input of a reduction, then its output."""
        given = self.sent_dtype if self._gives_input and self.sent_dtype is not None else dtype
        self._gives_input = not self._gives_input
        return torch.empty(*size, dtype=given, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """`output_tensor` [n] = this rank's shard of the sum over ranks of `input_tensor` [ranks * n]."""
        assert op == dist.ReduceOp.SUM, f"expected a sum, FSDP requires {op}"
        rank, count = group.rank(), group.size()
        rows = input_tensor.view(count, output_tensor.numel())
        with self._buffers.in_turn():
            for part in _parts(output_tensor.numel(), _BUFFER_BYTES // count // input_tensor.element_size()):
                memory = self._buffers.next()
                for other in ((rank + step) % count for step in range(1, count)):
                    sent = rows[other, part]
                    _rows(memory, other, sent, count)[rank].copy_(sent)
                memory.barrier()
                own = rows[rank, part]
                _sum_parts(own, _rows(memory, rank, own, count), rank, output_tensor[part])


class InPlaceReduction:
    """FSDP2's reduce-scatter in a group of one rank: the output is the input, instead of a copy of it.

    What `FSDPModule.set_custom_reduce_scatter` takes.
    """

    def __init__(self) -> None:
        self._input: Tensor | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 allocates the input of a reduction, then its output."""
        given, self._input = self._input, None
        if given is not None and given.shape == torch.Size(size) and given.dtype == dtype and given.device == device:
            return given
        self._input = torch.empty(*size, dtype=dtype, device=device)
        return self._input

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert group.size() == 1
        assert output_tensor is input_tensor


def _sum_parts(own: Tensor, parts: Tensor, rank: int, out: Tensor) -> None:
    """`sum_parts`, on a GPU by a Triton kernel."""
    if not (own.is_cuda and has_package("triton")):
        return sum_parts(own, parts, rank, out)
    from opslot.distributed import triton_kernels

    return triton_kernels.sum_parts(own, parts, rank, out)


def sum_parts(own: Tensor, parts: Tensor, rank: int, out: Tensor) -> None:
    """out [n] = the sum over dim 0 of `parts` [ranks, n], with `own` [n] for row `rank`, in the dtype of `out`.

    Overwrites that row.
    """
    parts[rank].copy_(own)
    torch.sum(parts, 0, dtype=out.dtype, out=out)


def _parts(length: int, most: int) -> Iterator[slice]:
    return (slice(start, min(start + most, length)) for start in range(0, length, most))


def _rows(memory: SharedMemory, rank: int, like: Tensor, count: int = 1) -> Tensor:
    """A rank's memory as `count` rows like `like` [n]."""
    return memory.buffers[rank][: count * like.nbytes].view(like.dtype).view(count, like.numel())


def use_copies(
    groups: list[tuple[FSDPModule, ProcessGroup]], device: torch.device, wanted: bool | None
) -> list[CopyReduceScatter]:
    """Replace FSDP's collectives by copies, and by nothing in groups of one rank. Every rank calls it alike.

    Args:
        groups: modules, and the ranks that shard each.
        wanted: True raises if copies are not possible; None keeps NCCL then; False keeps NCCL.

    Returns:
        The reductions by copies; empty with NCCL.

    Raises:
        ConfigError: a group's ranks are on several hosts, or their GPUs do not reach each other's memory.
    """
    for module, group in groups:
        if group.size() == 1:
            module.set_custom_reduce_scatter(InPlaceReduction())  # type: ignore[arg-type]
    shared = {group.group_name: group for _, group in groups if group.size() > 1}
    if wanted is False or not shared:
        return []
    obstacle = next(filter(None, (obstacle_to_copies(group, device) for group in shared.values())), None)
    if obstacle is not None:
        if wanted:
            raise ConfigError(
                f"fsdp.copy_engine is on, but {obstacle}",
                hint="remove it to use the collectives of the process group",
            )
        if device.type == "cuda":
            logger.info("FSDP uses NCCL instead of copies: %s", obstacle)
        return []
    comms = {name: (CopyAllGather(group, device), CopyReduceScatter(group, device)) for name, group in shared.items()}
    for module, group in groups:
        if group.group_name in comms:
            gather, reduce = comms[group.group_name]
            # The base classes are in a private module of torch.
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]
    return [reduce for _, reduce in comms.values()]


def obstacle_to_copies(group: ProcessGroup, device: torch.device) -> str | None:
    """Why the ranks of `group` cannot copy from each other's memory, or None; the same on every rank."""
    if device.type != "cuda":
        return f"the model runs on {device.type}, and copies need GPUs"
    devices = gather_objects((_host(), device.index), group)
    if len({host for host, _ in devices}) > 1:
        return "the ranks that shard a parameter are on several hosts"
    if len(set(devices)) < len(devices):
        return "each process sees only its own GPU (CUDA_VISIBLE_DEVICES)"
    others = [index for _, index in devices if index != device.index]
    reached = all(torch.cuda.can_device_access_peer(device.index, index) for index in others)
    if not all(gather_objects(reached, group)):
        return "the GPUs cannot access each other's memory"
    failure = ""
    try:
        SharedMemory(2**16, group, device).barrier()
    except (RuntimeError, ImportError, AttributeError) as error:
        failure = str(error).strip().splitlines()[0]
    failures = gather_objects(failure, group)
    return next((f"torch's symmetric memory failed: {found}" for found in failures if found), None)


def _host() -> str:
    """Identifies this machine; containers may share a host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()
