"""Converting a checkpoint folder between expert layouts, without building a model."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opslot._base.dtypes import floating_dtype
from opslot._base.errors import CheckpointError
from opslot._base.hub import local_model
from opslot._base.logging import get_logger
from opslot.checkpoint._report import Problems
from opslot.checkpoint.converter import Shapes
from opslot.checkpoint.experts import ExpertTensorConverter, check_layout, expert_targets_of_checkpoint
from opslot.checkpoint.folder import INDEX, read_config, read_folder, staged_folder
from opslot.checkpoint.hub_format import HubFormat
from opslot.checkpoint.hub_names import hub_names
from opslot.checkpoint.mapping import MappedSlice, map_tensors
from opslot.checkpoint.model_tensors import ModelTensors, stored_specs
from opslot.checkpoint.quantized import dequantized_entries, open_tensor, quantization_of
from opslot.checkpoint.safetensors_file import MappedFile, TensorEntry, TensorSpec
from opslot.checkpoint.save import Output, outputs_for, parse_size, shard_outputs, write_shards
from opslot.checkpoint.tensor_slice import TensorSlice, copy_overlap, extent, intersect

logger = get_logger(__name__)

_OPEN_FILES = 4
# Chat templates other than the default one.
_TEMPLATES = "additional_chat_templates"
# The number of experts in config.json.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def convert_folder(
    source: str | Path, destination: str | Path, *, layout: str, max_shard_size: int | str = "5GB"
) -> Path:
    """Write the checkpoint in `source` to `destination` with its experts in `layout`.

    FP8 and MXFP4 tensors are dequantized to the dtype in config.json, else bfloat16. Other tensors and files, such as
    config.json and the tokenizer's, are copied. Where experts have other names on the hub than in Transformers' model
    (Mixtral's w1, w2 and w3), all tensors get the hub's names in the layout "per_expert" and else the model's.
    Transformers reads "per_expert" and "stacked". Folders, except additional chat templates, and safetensors files that
    are not part of the checkpoint are left out and logged. The destination appears when it is complete. Memory is one
    tensor of the result and the mapped pages of a few files.

    Args:
        source: a Hugging Face checkpoint of any layout, or a model of the hub, ORG/NAME.
        destination: a folder that does not exist yet or is empty.
        layout: "per_expert", "stacked" or "transposed".
        max_shard_size: bytes of a file, or e.g. "5GB".

    Returns:
        The destination.

    Raises:
        CheckpointError: a source that is missing, corrupt, incomplete or of mixed layouts, or has no experts, or
            experts with biases (those of gpt-oss, whose gate and up projections alternate), without gates
            (Nemotron-H's) or that return their input (LongCat's), or a layout in which the model reads none (Llama 4's
            are transposed, Granite's stacked, and Ernie 4.5 VL's single experts); a destination that is not empty or
            cannot be written.
        ConfigError: unknown layout or size.
    """
    source, destination = local_model(source), Path(destination).expanduser()
    check_layout(layout)
    max_bytes = parse_size(max_shard_size)
    config = read_config(source)
    entries = dequantized_entries(read_folder(source), config, source, _dtype(config))
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise CheckpointError(
            f"{str(destination)!r} exists and is not an empty folder", hint="give another destination"
        )
    known = _meta_model(source, config)
    if identity := _identity_experts(known):
        raise CheckpointError(
            f"checkpoint {str(source)!r} holds experts that return their input, which have one layout",
            found=identity,
            hint="use the checkpoint as it is",
        )
    source_keys = list(entries)
    shapes = {name: entry.shape for name, entry in entries.items()}
    experts = expert_targets_of_checkpoint(shapes, at_least=_configured_experts(config))
    if not experts:
        # Such as Mixtral's, whose projections are called w1, w2 and w3.
        own = _model_names(known, shapes)
        entries = {own.get(name, name): entry for name, entry in entries.items()}
        shapes = {name: entry.shape for name, entry in entries.items()}
        experts = expert_targets_of_checkpoint(shapes, at_least=_configured_experts(config))
    if not experts:
        raise CheckpointError(
            f"checkpoint {str(source)!r} holds no experts, so there is nothing to convert",
            hint="give a mixture-of-experts checkpoint",
        )
    if biased := sorted(entries.keys() & {f"{name}_bias" for name in experts}):
        raise CheckpointError(
            f"checkpoint {str(source)!r} holds experts with biases, which have one layout",
            found=biased[0],
            hint="use the checkpoint as it is",
        )
    if not any(rows for _, rows, _ in experts.values()):
        raise CheckpointError(
            f"checkpoint {str(source)!r} holds experts without gate projections, which have one layout",
            found=f"no {min(experts).rpartition('.')[0]}.*.gate_proj.weight",
            hint="use the checkpoint as it is",
        )
    if layout != "transposed" and _reads_transposed(known, shapes, experts):
        raise CheckpointError(
            f"the experts of {config['architectures'][0]} are transposed in the model, which reads no other layout",
            found=f"layout {layout!r}",
            hint="use the checkpoint as it is",
        )
    model, slices = _map(source, entries, experts)
    outputs = outputs_for(model.targets, experts, layout)
    if known is not None:
        hub = HubFormat(known)
        if layout == "per_expert":
            outputs = _with_hub_names(outputs, hub, known)
        _require_read((output.spec.name for output in outputs), source_keys, layout, hub, known)
    shards = shard_outputs(outputs, max_bytes)
    with staged_folder(destination, sum(output.spec.nbytes for shard in shards.values() for output in shard)) as stage:
        write_shards(stage, shards, _reader(model, slices))
        _copy_companions(source, stage, {entry.file.name for entry in entries.values()})
        if quantization_of(config):
            _write_config(stage, config)
    logger.info("converted %s to %s in %s", source, layout, destination)
    return destination


def _reads_transposed(model: Any, shapes: Shapes, experts: Shapes) -> bool:
    """Whether experts are transposed both in a checkpoint and in Transformers' model of it, as in Llama 4."""
    transposed = next((name for name, shape in experts.items() if tuple(shapes.get(name, shape)) != tuple(shape)), None)
    if transposed is None or model is None:
        return False
    own = model.state_dict().get(transposed)
    return own is not None and own.shape == tuple(shapes[transposed])


def _identity_experts(model: Any) -> str:
    """Experts of Transformers' model with rows in `gate_up_proj` alone, as LongCat's; "" if there are none."""
    shapes = {} if model is None else {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, shape in shapes.items():
        down = shapes.get(f"{name.removesuffix('gate_up_proj')}down_proj", shape)
        if name.endswith("experts.gate_up_proj") and down[0] < shape[0]:
            return f"{name.removesuffix('.gate_up_proj')}: {shape[0]} experts, of which {down[0]} have a down_proj"
    return ""


def _model_names(model: Any, shapes: Shapes) -> Mapping[str, str]:
    """The names in Transformers' model, or per expert, of source keys that only have another name there."""
    names = hub_names(model, shapes) if model is not None else None
    return {} if names is None else names.copied


def _with_hub_names(outputs: list[Output], hub: HubFormat, model: Any) -> list[Output]:
    """`outputs` of single experts, with the names that `save_pretrained` gives to them and to all other tensors."""
    saved = {spec.name: spec.shape for group in hub.groups(stored_specs(model)) for spec in group.results}
    names = hub_names(model, saved)
    own = {} if names is None else {own: name for name, own in names.copied.items()}
    return [
        replace(output, spec=replace(output.spec, name=own.get(output.spec.name, output.spec.name)))
        for output in outputs
    ]


def _require_read(names: Iterable[str], source_keys: Iterable[str], layout: str, hub: HubFormat, model: Any) -> None:
    """Raise CheckpointError for tensors that Transformers reads in the source, and not by the `names` of the result."""
    specs = stored_specs(model)
    lost = {read for key in source_keys if (read := hub.read_as(key, specs)) in specs}
    lost -= {hub.read_as(name, specs) for name in names}
    if lost:
        raise CheckpointError(
            f"{type(model).__name__} of Transformers reads no experts in the layout {layout!r}",
            found=f"{min(lost)} would have no values",
            hint=f"use the layout {'stacked' if layout == 'per_expert' else 'per_expert'}",
        )


def _meta_model(source: Path, config: dict[str, Any]) -> Any:
    """Transformers' model of a checkpoint on meta; None where it has none."""
    import transformers

    try:
        with torch.device("meta"):
            return getattr(transformers, config["architectures"][0])(transformers.AutoConfig.from_pretrained(source))
    # Of any model's constructor; converting does not need a config that it accepts.
    except Exception:
        return None


def _copy_companions(source: Path, destination: Path, shards: set[str]) -> None:
    left_out = []
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix != ".safetensors":
            if path.name != INDEX:
                shutil.copy2(path, destination / path.name)
        elif path.name == _TEMPLATES and path.is_dir():
            shutil.copytree(path, destination / path.name)
        elif path.name not in shards:
            left_out.append(path.name)
    if left_out:
        logger.info("left out, not part of the checkpoint: %s", ", ".join(left_out))


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    """config.json without its `quantization_config`."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _dtype(config: dict[str, Any]) -> torch.dtype:
    """The dtype in config.json; bfloat16 if it has none."""
    given = config.get("dtype") or config.get("torch_dtype")
    return floating_dtype(given, f"dtype {given!r} in config.json") if isinstance(given, str) else torch.bfloat16


def _configured_experts(config: dict[str, Any]) -> int:
    """Experts per layer according to config.json; 0 if it has no such entry."""
    sections = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    counts = [section.get(key) for section in sections for key in _COUNTS]
    return max((count for count in counts if isinstance(count, int)), default=0)


def _map(
    source: Path, entries: dict[str, TensorEntry], experts: dict[str, tuple[int, ...]]
) -> tuple[ModelTensors, dict[str, list[MappedSlice]]]:
    """The tensors of a model of this checkpoint, and the slices that fill each; checked for completeness."""
    problems = Problems(f"checkpoint {str(source)!r} cannot be converted")
    converter = ExpertTensorConverter(experts)
    targets: dict[str, TensorSpec] = {}
    for name, entry in entries.items():
        target = converter.target_of(name)
        if target is None:
            targets[name] = TensorSpec(name, entry.dtype, entry.shape)
            continue
        first = targets.setdefault(target, TensorSpec(target, entry.dtype, experts[target]))
        if first.dtype != entry.dtype:
            item = f"{name}: {entry.dtype}, others of {target}: {first.dtype}"
            problems.add("experts of several dtypes", item, "save them in one dtype first")
    model = ModelTensors(targets)
    mapping = map_tensors(entries, model, [converter], problems)
    problems.raise_if_any()
    slices: dict[str, list[MappedSlice]] = {}
    for mapped in mapping.slices:
        slices.setdefault(mapped.tensor_slice.target, []).append(mapped)
    return model, slices


def _reader(model: ModelTensors, slices: dict[str, list[MappedSlice]]) -> Callable[[TensorSlice], Tensor]:
    """What reads any region of a model's tensor from the slices in the source."""
    open_file = functools.lru_cache(maxsize=_OPEN_FILES)(MappedFile)

    def read(tensor_slice: TensorSlice) -> Tensor:
        region = torch.empty(extent(tensor_slice.region), dtype=model.targets[tensor_slice.target].dtype)
        for item in slices[tensor_slice.target]:
            if intersect(tensor_slice.region, item.tensor_slice.region) is not None:
                stored = open_tensor(open_file(item.entry.file), item.entry)
                copy_overlap(region, tensor_slice.region, stored, item.tensor_slice)
        return tensor_slice.as_stored(region)

    return read
