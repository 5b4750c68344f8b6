"""Streaming a Hugging Face checkpoint into a model, each rank reading only what it keeps."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opslot._base.device import usable_cores
from opslot._base.hub import local_model
from opslot._base.logging import get_logger
from opslot.checkpoint._report import Problems
from opslot.checkpoint.converter import Converter
from opslot.checkpoint.experts import ExpertTensorConverter
from opslot.checkpoint.folder import read_config, read_folder
from opslot.checkpoint.hub_names import hub_names
from opslot.checkpoint.initialize import initialize, materialize
from opslot.checkpoint.mapping import LoadMapping, MappedSlice, Stream, map_tensors
from opslot.checkpoint.model_tensors import ModelTensors, clean_fqn, tensors_of
from opslot.checkpoint.quantized import (
    QuantizedTensor,
    dequantized_entries,
    open_tensor,
    remove_quantization_config,
    whole_tensor,
)
from opslot.checkpoint.safetensors_file import MappedFile
from opslot.checkpoint.tensor_slice import (
    Region,
    TensorSlice,
    copy_overlap,
    intersect,
    local_ranges,
    pieces,
    relative,
    volume,
)
from opslot.distributed import on_all_ranks
from opslot.distributed.dtensors import local_tensor

logger = get_logger(__name__)

# Page faults of the mapped file and of fresh memory dominate; more threads than this gain nothing on any
# machine measured.
_MAX_THREADS = 8
_TASK_BYTES = 32 << 20
# Enough under way to keep a disk busy, and little beside the model.
_TASKS_AHEAD = 8
_NEAR_BYTES = 1 << 20
_CHECKED_NUMEL = 1 << 24


@dataclass
class LoadReport:
    """What `load_weights` did.

    Attributes:
        folder: the checkpoint.
        tensors: checkpoint tensors that this rank read, at least in part.
        bytes_read: bytes of them that it read.
        seconds: wall time.
        layouts: layout of each family of expert tensors, e.g. {"model.layers.*.mlp.experts": "per_expert"}.
        missing: parameters that are not in the checkpoint, initialized randomly.
        extra: checkpoint tensors left out by `allow_extra`.
        not_finite: parameters in which this rank read a NaN or an infinity.
    """

    folder: Path
    tensors: int = 0
    bytes_read: int = 0
    seconds: float = 0.0
    layouts: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rate = self.bytes_read / 1e9 / max(self.seconds, 1e-9)
        size = f"{self.tensors} tensors, {self.bytes_read / 1e9:.2f} GB"
        text = f"{size} in {self.seconds:.1f} s ({rate:.1f} GB/s) from {self.folder}"
        if self.missing:
            text += f"; initialized randomly: {_shown(self.missing)}"
        if self.extra:
            text += f"; left out: {_left_out(self.extra)}"
        return text


def _left_out(names: Sequence[str]) -> str:
    """The names; of many, their number by part of the model."""
    if len(names) <= 10:
        return ", ".join(names)
    counts = Counter(name.partition(".")[0] for name in names)
    return ", ".join(f"{part} ({count:,} tensors)" for part, count in counts.items())


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + " ..." * (len(names) > 10)


def load_weights(
    model: nn.Module,
    folder: str | Path,
    *,
    converters: Sequence[Converter] | None = None,
    device: torch.device | str | None = None,
    allow_missing: Collection[str] = (),
    allow_extra: Collection[str] = (),
) -> LoadReport:
    """Load the Hugging Face checkpoint in `folder` (safetensors, sharded or not) into `model`.

    FP8 and MXFP4 tensors are dequantized as they are read, and the model's config loses its `quantization_config`.
    A module with a method `load_weight(weight, device)` and its weight on meta gets the whole weight when it is read,
    to quantize it. So do functions in a module's `load_weights`, by the names of parameters.

    Names, shapes, dtypes and sizes are checked from the headers of all shards before anything is written, so
    an error leaves the model as it was. Then the files are read one after the other, directly into the parameters. Of a
    DTensor only this rank's shard is read; with several processes every rank must call, and all raise if one finds an
    error.

    Args:
        model: parameters may be real, on meta, or sharded (DTensor); tied ones are filled once.
        folder: holds model.safetensors, or model.safetensors.index.json and its shards; or a model of the Hugging Face
            hub, ORG/NAME.
        converters: for names and shapes that differ from the model's; None detects the experts' layout and
            reads the source keys that Transformers' `from_pretrained` reads.
        device: where meta parameters get memory; None is the CPU, or a DTensor's mesh device.
        allow_missing: patterns (`fnmatch`) of parameters that may be absent, e.g. ["score.weight"], or ["*"]; they are
            initialized randomly.
        allow_extra: patterns of checkpoint tensors that may be left out, e.g. ["lm_head.weight"].

    Raises:
        CheckpointError: the checkpoint is missing, corrupt or does not fit; the message lists everything that
            is wrong.
    """
    start = time.perf_counter()
    folder = local_model(folder)
    tensors = tensors_of(model)
    sharded = any(isinstance(tensor, DTensor) for tensor in tensors.values())
    checked: list[tuple[LoadMapping, dict[str, Region]]] = []

    def check() -> None:
        mapping = _check(model, folder, converters, allow_missing, allow_extra)
        regions = {name: local_ranges(tensor) for name, tensor in tensors.items()}
        _check_range(mapping, ModelTensors.of(model), regions)
        checked.append((mapping, regions))

    if sharded:
        on_all_ranks(check)
    else:
        check()
    ((mapping, regions),) = checked
    present = set(tensors)
    meta_buffers = [clean_fqn(name) for name, buffer in model.named_buffers() if buffer.is_meta]
    quantizing = _quantizing(model)
    materialize(model, device, [id(weight) for weight, _ in quantizing.values()])
    remove_quantization_config(getattr(model, "config", None))
    initialize(model, mapping.missing, [name for name in meta_buffers if name not in present])
    report = LoadReport(folder, layouts=mapping.layouts, missing=mapping.missing, extra=mapping.extra)
    with torch.no_grad():
        _execute(mapping, _Destinations(tensors_of(model), quantizing, device, mapping, regions), report)
    report.seconds = time.perf_counter() - start
    # Buffers may hold infinities, such as the bounds of Gemma 4's clipped linear layers.
    parameters = {clean_fqn(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    report.not_finite = sorted(parameters.intersection(report.not_finite))
    if report.not_finite:
        logger.warning(
            "%d parameters of %s hold NaN or infinity, e.g. %s; the loss will not be finite",
            len(report.not_finite),
            folder,
            _shown(report.not_finite),
        )
    logger.log(logging.WARNING if report.missing else logging.INFO, "loaded %s", report)
    return report


def _quantizing(model: nn.Module) -> dict[str, tuple[Tensor, Callable[..., None]]]:
    """The weights on meta that are quantized as they are read, and what takes each."""
    found: dict[str, tuple[Tensor, Callable[..., None]]] = {}
    for path, module in model.named_modules():
        loads: dict[str, Any] = getattr(module, "load_weights", {})
        if hasattr(module, "load_weight"):
            loads = {"weight": module.load_weight}
        found |= {clean_fqn(f"{path}.{name}"): (getattr(module, name), load) for name, load in loads.items()}
    return {name: (weight, load) for name, (weight, load) in found.items() if weight.is_meta}


def _check(
    model: nn.Module,
    folder: Path,
    converters: Sequence[Converter] | None,
    allow_missing: Collection[str],
    allow_extra: Collection[str],
) -> LoadMapping:
    """Map the checkpoint to the model; raises CheckpointError with everything that is wrong."""
    entries = dequantized_entries(read_folder(folder), read_config(folder), folder)
    names = None
    if converters is None:
        names = hub_names(model, {name: entry.shape for name, entry in entries.items()})
        converters = [ExpertTensorConverter.for_model(model)] if names is None else names.converters
    problems = Problems(f"checkpoint {str(folder)!r} does not fit {type(model).__name__}")
    mapping = map_tensors(
        entries,
        ModelTensors.of(model),
        converters,
        problems,
        allow_missing=allow_missing,
        allow_extra=allow_extra,
        names=names,
    )
    problems.raise_if_any()
    return mapping


def _check_range(mapping: LoadMapping, model: ModelTensors, regions: Mapping[str, Region]) -> None:
    """Raises: CheckpointError when a finite value becomes infinite in the dtype of its parameter."""
    problems = Problems("the checkpoint has values that its parameters cannot hold")
    for item in mapping.slices:
        wanted, stored = model.targets[item.tensor_slice.target].dtype, item.entry.dtype
        # Of float32's largest values, bfloat16 lacks 0.4 %; not worth reading every checkpoint twice.
        if not stored.is_floating_point or torch.finfo(stored).max < 2 * torch.finfo(wanted).max:
            continue
        overlap = intersect(regions[item.tensor_slice.target], item.tensor_slice.region)
        if overlap is None or not volume(overlap):
            continue
        stored_tensor = open_tensor(MappedFile(item.entry.file), item.entry)
        values = (item.tensor_slice.read(stored_tensor, part) for part in pieces(overlap, _CHECKED_NUMEL))
        largest = max(float(torch.nan_to_num(part, 0.0, 0.0, 0.0).abs().max()) for part in values)
        if largest > torch.finfo(wanted).max:
            found = f"{item.entry.name}: {largest:g} in {wanted}"
            problems.add("values that overflow", found, "load in a dtype of a larger range, or correct the checkpoint")
    problems.raise_if_any()


def _is_finite(values: Tensor) -> bool:
    """In one pass over most tensors: a sum is finite only if all terms are."""
    if not values.is_floating_point() or values.itemsize < 2:
        return True
    return bool(torch.isfinite(values.sum(dtype=torch.float32))) or bool(torch.isfinite(values).all())


class _Destinations:
    """Where slices are written: a model's tensors, and buffers for weights that their modules quantize.

    Attributes:
        regions: the part of each tensor that this rank holds.
        not_finite: names of the tensors in which a NaN or an infinity was written.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        quantizing: Mapping[str, tuple[Tensor, Callable[..., None]]],
        device: torch.device | str | None,
        mapping: LoadMapping,
        regions: Mapping[str, Region],
    ) -> None:
        self.regions = regions
        self.not_finite: set[str] = set()
        self._local = {n: local_tensor(tensor).detach() for n, tensor in tensors.items() if n not in quantizing}
        self._quantizing, self._device = quantizing, device
        slices = [item.tensor_slice for item in mapping.slices]
        self._left = Counter(x.target for x in slices if intersect(regions[x.target], x.region) is not None)
        self._buffers: dict[str, Tensor] = {}
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self._local or name in self._quantizing

    def write(self, stored: Tensor | QuantizedTensor, tensor_slice: TensorSlice) -> None:
        """Write this rank's part of a slice; a buffer is quantized after its last one."""
        name = tensor_slice.target
        written = copy_overlap(self._memory(name), self.regions[name], stored, tensor_slice)
        if written is not None and not _is_finite(written):
            self.not_finite.add(name)
        with self._lock:
            self._left[name] -= 1
            buffer = None if self._left[name] else self._buffers.pop(name, None)
        if buffer is not None:
            self._quantizing[name][1](buffer, self._device)

    def _memory(self, name: str) -> Tensor:
        if name in self._local:
            return self._local[name]
        with self._lock:
            if name not in self._buffers:
                self._buffers[name] = torch.empty_like(local_tensor(self._quantizing[name][0]), device="cpu")
            return self._buffers[name]

    def finish(self) -> None:
        """Everything is written; quantizes what converters returned."""
        for name, buffer in self._buffers.items():
            self._quantizing[name][1](buffer, self._device)


def _execute(mapping: LoadMapping, destinations: _Destinations, report: LoadReport) -> None:
    """Copy the slices to their destinations, file by file, several tensors at a time."""
    by_file: dict[Path, list[MappedSlice]] = defaultdict(list)
    for item in mapping.slices:
        overlap = intersect(destinations.regions[item.tensor_slice.target], item.tensor_slice.region)
        if overlap is not None:
            by_file[item.entry.file].append(item)
            report.tensors += 1
            report.bytes_read += item.entry.nbytes * volume(overlap) // volume(item.tensor_slice.region)
    with ThreadPoolExecutor(min(_MAX_THREADS, usable_cores()), thread_name_prefix="opslot-load") as pool:
        for file, slices in by_file.items():
            _copy_slices(MappedFile(file), slices, destinations, pool)
    for stream in mapping.streams:
        _run_stream(stream, destinations, report)
    destinations.finish()
    report.not_finite = sorted(destinations.not_finite)


def _copy_slices(
    mapped: MappedFile, slices: list[MappedSlice], destinations: _Destinations, pool: ThreadPoolExecutor
) -> None:
    """Copy slices of one file, in the threads of `pool`."""
    tasks = list(_tasks(slices))

    def copy(number: int) -> None:
        for task in tasks[number + _TASKS_AHEAD : number + _TASKS_AHEAD + 1]:
            _read_ahead(task, mapped, destinations.regions)
        for item in tasks[number]:
            destinations.write(open_tensor(mapped, item.entry), item.tensor_slice)

    for task in tasks[:_TASKS_AHEAD]:
        _read_ahead(task, mapped, destinations.regions)
    list(pool.map(copy, range(len(tasks))))


def _tasks(slices: list[MappedSlice]) -> Iterator[list[MappedSlice]]:
    """Slices in the order of their bytes, grouped so that scheduling a task costs little."""
    task: list[MappedSlice] = []
    nbytes = 0
    for item in sorted(slices, key=lambda item: item.entry.start):
        task.append(item)
        nbytes += item.entry.nbytes
        if nbytes >= _TASK_BYTES:
            yield task
            task, nbytes = [], 0
    if task:
        yield task


def _read_ahead(task: list[MappedSlice], mapped: MappedFile, regions: Mapping[str, Region]) -> None:
    """Prefetch the bytes of this rank's slices, merging neighboring ranges."""
    ranges: list[tuple[int, int]] = []
    for item in task:
        start, stop = _byte_range(item, regions[item.tensor_slice.target])
        if ranges and start <= ranges[-1][1] + _NEAR_BYTES:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    for start, stop in ranges:
        mapped.read_ahead(start, stop)


def _byte_range(item: MappedSlice, region: Region) -> tuple[int, int]:
    """The byte range, in its file, of the part of `item` that is in `region`."""
    tensor_slice, entry = item.tensor_slice, item.entry
    overlap = intersect(region, tensor_slice.region)
    assert overlap is not None
    if not tensor_slice.shape:
        return entry.start, entry.start + entry.nbytes
    kept = relative(overlap, tensor_slice.region)[-len(tensor_slice.shape) :]
    rows = kept[-1] if tensor_slice.transposed and len(tensor_slice.shape) == 2 else kept[0]
    row_bytes = entry.nbytes // tensor_slice.shape[0]
    return entry.start + rows.start * row_bytes, entry.start + rows.stop * row_bytes


def _run_stream(stream: Stream, destinations: _Destinations, report: LoadReport) -> None:
    """Pass whole tensors through a converter and write what it returns."""

    def write(returned: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in returned:
            if name in destinations:
                destinations.write(tensor, TensorSlice.whole(name, tensor.shape))

    file: Path | None = None
    for name, entry in stream.entries:
        if entry.file != file:
            # The pages that were read count as this process's memory as long as their file is mapped.
            file, mapped = entry.file, MappedFile(entry.file)
        write(list(stream.converter.convert(name, whole_tensor(mapped, entry)) or ()))
        report.tensors += 1
        report.bytes_read += entry.nbytes
    write(stream.converter.finalize())
