"""Saving a model in Hugging Face layout, from one process or from any mesh."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opslot._base.errors import CheckpointError, ConfigError
from opslot._base.logging import get_logger
from opslot.checkpoint.adapters import base_model, has_adapters, merged_weights, without_wrapper
from opslot.checkpoint.excluded import ExcludedParts
from opslot.checkpoint.experts import check_layout, expert_targets, split_target
from opslot.checkpoint.folder import INDEX, WEIGHTS, save_generation_config, staged_folder
from opslot.checkpoint.hub_format import HubFormat, HubGroup, hub_format
from opslot.checkpoint.model_tensors import clean_fqn, stored_specs, tensors_of, with_removed_experts
from opslot.checkpoint.quantized import whole_tensor
from opslot.checkpoint.safetensors_file import NAMES, MappedFile, TensorEntry, TensorSpec, write_safetensors
from opslot.checkpoint.tensor_slice import TensorSlice
from opslot.distributed import gather_objects, is_first_rank, on_all_ranks
from opslot.distributed.dtensors import full_tensor, local_tensor
from opslot.slots.binding import original_class

logger = get_logger(__name__)

_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {**_DECIMAL, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(size: int | str) -> int:
    """Bytes of a size such as "5GB", "512MiB" or a number.

    Raises:
        ConfigError: it cannot be read, or is not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", str(size).upper())
    nbytes = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if nbytes <= 0:
        raise ConfigError(
            f"max_shard_size={size!r} is not a valid size", hint='use a number of bytes or e.g. "5GB" or "512MiB"'
        )
    return nbytes


@dataclass(frozen=True, slots=True)
class Converted:
    """A tensor that Transformers' conversion of some of the model's tensors gives, by its name in the checkpoint."""

    group: HubGroup
    name: str


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor of the checkpoint to be written: a part of a model's tensor, a conversion, or another checkpoint's."""

    spec: TensorSpec
    source: TensorSlice | Converted | TensorEntry


def hub_outputs(tensors: Mapping[str, TensorSpec], hub: HubFormat) -> list[Output]:
    """The checkpoint's tensors, as `save_pretrained` writes them."""
    outputs: list[Output] = []
    for group in hub.groups(tensors):
        for spec in group.results:
            source = Converted(group, spec.name) if group.converts else TensorSlice.whole(group.sources[0], spec.shape)
            outputs.append(Output(spec, source))
    return outputs


def outputs_for(tensors: Mapping[str, TensorSpec], experts: Mapping[str, tuple[int, ...]], layout: str) -> list[Output]:
    """The checkpoint's tensors for a model's, with the experts in `layout`.

    Args:
        tensors: the model's.
        experts: those of them that are [E, 2I, H] or [E, H, I] expert tensors.
        layout: one of `LAYOUTS`.
    """
    outputs: list[Output] = []
    for name, spec in tensors.items():
        whole = [(name, TensorSlice.whole(name, spec.shape))]
        parts = split_target(name, spec.shape, layout) if name in experts else whole
        outputs += [Output(TensorSpec(part, spec.dtype, place.shape), place) for part, place in parts]
    return outputs


def _specs_of(model: nn.Module | None, tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Name, dtype and shape of each of `tensors` in the checkpoint, before conversions."""
    if model is None:
        return {name: TensorSpec.of(name, tensor) for name, tensor in tensors.items()}
    specs = stored_specs(model)
    return {name: specs[name] for name in tensors}


def _outputs_of(
    model: nn.Module | None, specs: Mapping[str, TensorSpec], layout: str | None
) -> tuple[list[Output], HubFormat | None]:
    """The checkpoint's tensors for those of `model`, and the conversion of `save_pretrained` where they use it."""
    hub = hub_format(model) if layout is None else None
    if hub is not None:
        return hub_outputs(specs, hub), hub
    experts = expert_targets({name: spec.shape for name, spec in specs.items()})
    return outputs_for(specs, experts, layout or "stacked"), None


def shard_outputs(outputs: Sequence[Output], max_bytes: int) -> dict[str, list[Output]]:
    """Outputs by file name, in order, each file at most `max_bytes` of tensors (more only for one larger tensor)."""
    shards: list[list[Output]] = [[]]
    used = 0
    for output in outputs:
        if shards[-1] and used + output.spec.nbytes > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(output)
        used += output.spec.nbytes
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def write_shards(folder: Path, shards: Mapping[str, Sequence[Output]], produce: Callable[[Any], Tensor]) -> None:
    """Write the files of `shards` into `folder`, and the index when there are several.

    Args:
        produce: gives the tensor of an output's `source`.
    """
    for file, outputs in shards.items():
        tensors = (produce(output.source) for output in outputs)
        write_safetensors(folder / file, [output.spec for output in outputs], tensors)
    if len(shards) > 1:
        specs = [output.spec for outputs in shards.values() for output in outputs]
        metadata = {
            "total_parameters": sum(math.prod(spec.shape) for spec in specs),
            "total_size": sum(spec.nbytes for spec in specs),
        }
        weight_map = {output.spec.name: file for file, outputs in shards.items() for output in outputs}
        text = json.dumps({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
        (folder / INDEX).write_text(text + "\n")


def save_weights(
    model_or_state_dict: nn.Module | Mapping[str, Tensor],
    folder: str | Path,
    *,
    layout: str | None = None,
    max_shard_size: int | str = "5GB",
    config: Any = None,
    merge_adapters: bool = False,
    copied: Sequence[TensorEntry] = (),
) -> Path:
    """Save a model as a Hugging Face checkpoint: safetensors, an index if sharded, config.json,
    generation_config.json.

    The folder appears whole or not at all. Memory beyond the model is one tensor, or those that are converted together.
    With sharded parameters (DTensor) every rank must call; tensors are gathered one at a time and rank 0 writes.

    Args:
        model_or_state_dict: a model, or its tensors by name.
        folder: made if absent; in an existing one older weights are replaced and other files stay.
        layout: None writes the names and tensors that Transformers' `save_pretrained` writes, which are the hub's; a
            state dict, and a model that is not Transformers', keep their own. "per_expert", "stacked" or "transposed"
            write the model's own names with the experts in that layout.
        max_shard_size: bytes of a file, or e.g. "5GB".
        config: Transformers config to save; None takes the model's.
        merge_adapters: add a model's LoRA adapters to the weights that are written; the model is not changed.
        copied: tensors of another checkpoint that are written too, under their names.

    Returns:
        The folder.

    Raises:
        CheckpointError: the folder cannot be written or the disk is full, a tensor has no memory (meta), or the model
            has adapters, which plain Transformers would leave out.
        ConfigError: unknown layout or size.
    """
    if merge_adapters and isinstance(model_or_state_dict, nn.Module) and has_adapters(model_or_state_dict):
        model = without_wrapper(model_or_state_dict)
        deltas = merged_weights(model)
        with base_model(model, trained=True):
            return _save(model, folder, layout, max_shard_size, config, deltas, copied)
    if isinstance(model_or_state_dict, nn.Module):
        _require_no_adapters(model_or_state_dict)
    return _save(model_or_state_dict, folder, layout, max_shard_size, config, {}, copied)


def _save(
    model_or_state_dict: nn.Module | Mapping[str, Tensor],
    folder: str | Path,
    layout: str | None,
    max_shard_size: int | str,
    config: Any,
    deltas: Mapping[str, Callable[[], Tensor]],
    copied: Sequence[TensorEntry],
) -> Path:
    check_layout(layout)
    max_bytes, folder = parse_size(max_shard_size), Path(folder)
    if isinstance(model_or_state_dict, nn.Module):
        _require_no_quantization(config if config is not None else getattr(model_or_state_dict, "config", None))
        model, tensors = model_or_state_dict, tensors_of(model_or_state_dict)
    else:
        model, tensors = None, {clean_fqn(name): tensor for name, tensor in model_or_state_dict.items()}
    tensors = _untied(tensors)
    specs = _specs_of(model, tensors)
    outputs, hub = _outputs_of(model, specs, layout)
    outputs += [Output(TensorSpec(entry.name, entry.dtype, entry.shape), entry) for entry in copied]
    shards = shard_outputs(outputs, max_bytes)
    gather = _Gatherer(tensors, specs, hub, deltas)
    error: Exception | None = None
    if is_first_rank():
        try:
            with staged_folder(folder, sum(o.spec.nbytes for shard in shards.values() for o in shard)) as stage:
                write_shards(stage, shards, gather)
                _save_configs(model, config, stage)
        except Exception as problem:  # other ranks wait in the gathers below, so these are finished first
            error = problem
    if gather.collective:
        for source in _remaining(shards, gather.served):
            gather.gather(source)
        on_all_ranks(lambda: _raise(error))
    _raise(error)
    logger.debug("saved %d files of weights in %s", len(shards), folder)
    return folder


def named_weights(model: nn.Module, *, merge_adapters: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The model's weights by the names that its checkpoints on the hub have, one after another, e.g. for the
    `load_weights` of an inference engine.

    Stacked experts come under the names of single experts where the hub has those. With sharded parameters (DTensor)
    every rank must take all weights: each is gathered, and yielded whole on every rank. Unsharded weights that are only
    renamed share memory with the model's; copy them if training continues before they are used.

    Args:
        merge_adapters: with the LoRA adapters added; the model is not changed.

    Raises:
        CheckpointError: a tensor has no memory (meta), or the model has adapters and `merge_adapters` is off.
    """
    model = without_wrapper(model)
    if not merge_adapters:
        _require_no_adapters(model)
    deltas = merged_weights(model) if has_adapters(model) else {}
    with base_model(model, trained=True):
        tensors = _untied(tensors_of(model))
        specs = _specs_of(model, tensors)
        outputs, hub = _outputs_of(model, specs, None)
    gather = _Gatherer(tensors, specs, hub, deltas)
    for output in outputs:
        yield output.spec.name, gather(output.source)


def export_hf(
    model: nn.Module,
    folder: str | Path,
    *,
    processors: Iterable[Any] = (),
    max_shard_size: int | str = "5GB",
    merge_adapters: bool = False,
    source: str | Path | None = None,
    keep_excluded: bool = False,
) -> Path:
    """`save_weights`, and beside the weights what else the model's users load: tokenizer, processor.

    Args:
        processors: objects with `save_pretrained(folder)`, saved by rank 0; None among them is skipped.
        source: checkpoint that the model was trained from, a folder or a model of the hub; files that Transformers
            needs and no processor saves are copied from it.
        keep_excluded: also copy the weights of `source` that the model is built without, such as the speech parts of
            an omni model.
        model, folder, max_shard_size, merge_adapters: as in `save_weights`, which also lists the errors.

    Raises:
        CheckpointError: a processor cannot be saved; on rank 0 alone, where the weights are saved by then.
    """
    excluded = ExcludedParts.of(model, source, keep_excluded)
    saved = save_weights(
        model,
        folder,
        max_shard_size=max_shard_size,
        config=excluded.config,
        merge_adapters=merge_adapters,
        copied=excluded.entries,
    )
    save_processors(processors, saved)
    excluded.copy_files(saved)
    return saved


def save_processors(processors: Iterable[Any], folder: Path) -> None:
    """Save tokenizers and the like beside weights; rank 0 does, and skips None."""
    for processor in processors if is_first_rank() else ():
        if processor is None:
            continue
        _forget_padding(processor)
        try:
            processor.save_pretrained(folder)
        except Exception as error:  # tokenizers raises nothing narrower on a full disk
            raise CheckpointError(
                f"{type(processor).__name__} cannot be saved to {str(folder)!r}: {error}",
                hint="make room there, or save it yourself with save_pretrained; the weights are there",
            ) from error


def _forget_padding(processor: Any) -> None:
    """Remove the padding and truncation of the last call from the tokenizers of `processor`, or from the tokenizer.

    tokenizer.json would have them, and a processor passes those of tokenizer.json to the extractors of its media too.
    """
    for part in (processor, *getattr(processor, "__dict__", {}).values()):
        tokenizer, loaded = getattr(part, "backend_tokenizer", None), getattr(part, "init_kwargs", {})
        # These entries are of the tokenizer.json that was loaded.
        if tokenizer is not None and "pad_to_multiple_of" not in loaded:
            tokenizer.no_padding()
        if tokenizer is not None and "truncation_strategy" not in loaded:
            tokenizer.no_truncation()


def _require_no_adapters(model: nn.Module) -> None:
    adapters = getattr(model, "peft_config", None)
    if adapters:
        raise CheckpointError(
            f"{type(model).__name__} has adapters ({', '.join(adapters)}), whose names Transformers does not know",
            hint="save model.merge_and_unload(), pass merge_adapters=True, or save the adapters alone with "
            "opslot.checkpoint.save_adapter",
        )


def _require_no_quantization(config: Any) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(
            "the config has a quantization_config, and save_weights does not quantize",
            hint="delete config.quantization_config if the weights are not quantized, or use save_pretrained",
        )


def _untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` with those that share memory under their first name only, as the hub stores tied weights.

    Raises:
        CheckpointError: tensors without memory, or of a dtype that safetensors lacks.
    """
    kept: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        local = local_tensor(tensor)
        if local.is_meta:
            raise CheckpointError(f"{name} is on the meta device and has no values", hint="load weights first")
        if tensor.dtype not in NAMES:
            raise CheckpointError(f"{name} is {tensor.dtype}, which safetensors cannot hold", hint="cast it first")
        where = (local.device, local.data_ptr(), tuple(tensor.shape), local.stride())
        kept.setdefault(where if local.numel() else (name,), name)
    aliases = tensors.keys() - kept.values()
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        # A rank whose parts are empty cannot see that they are one tensor's.
        aliases = set().union(*gather_objects(aliases))
    return {name: tensor for name, tensor in tensors.items() if name not in aliases}


class _Gatherer:
    """Gives the checkpoint tensors of sources, holding what one of them needs at a time.

    Every rank must ask for the sources in the same order, since gathering a DTensor is collective.

    Args:
        specs: of each tensor in the checkpoint.
        deltas: what is added to a tensor, by name.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        specs: Mapping[str, TensorSpec],
        hub: HubFormat | None,
        deltas: Mapping[str, Callable[[], Tensor]],
    ) -> None:
        self._tensors, self._specs = tensors, specs
        self._deltas = deltas
        self._hub = hub
        self._gathered: tuple[tuple[str, ...], dict[str, Tensor]] = (), {}
        self._converted: dict[str, Tensor] = {}
        self.collective = any(isinstance(tensor, DTensor) for tensor in tensors.values())
        self.served = 0

    def gather(self, source: TensorSlice | Converted) -> dict[str, Tensor]:
        """The model's whole tensors that `source` is made of."""
        self.served += 1
        names = source.group.sources if isinstance(source, Converted) else (source.target,)
        if self._gathered[0] != names:
            self._gathered, self._converted = ((), {}), {}
            self._gathered = names, {name: self._whole(name) for name in names}
        return self._gathered[1]

    def _whole(self, name: str) -> Tensor:
        whole = with_removed_experts(full_tensor(self._tensors[name].detach()), self._specs[name])
        if name not in self._deltas:
            return whole
        return (whole.float() + self._deltas[name]()).to(whole.dtype)

    def __call__(self, source: TensorSlice | Converted | TensorEntry) -> Tensor:
        if isinstance(source, TensorEntry):
            return whole_tensor(MappedFile(source.file), source)
        gathered = self.gather(source)
        if isinstance(source, TensorSlice):
            return source.as_stored(gathered[source.target][source.region])
        if not self._converted:
            assert self._hub is not None
            self._converted = self._hub.convert(gathered)
        return self._converted[source.name]


def _remaining(shards: Mapping[str, Sequence[Output]], served: int) -> Iterator[TensorSlice | Converted]:
    """What has not been saved yet: everything on ranks that do not write, the rest after an error on rank 0."""
    sources = [output.source for outputs in shards.values() for output in outputs]
    return iter([source for source in sources if not isinstance(source, TensorEntry)][served:])


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _save_configs(model: nn.Module | None, config: Any, folder: Path) -> None:
    """config.json with the class that the weights are of, and generation_config.json when the model generates."""
    config = copy.deepcopy(config if config is not None else getattr(model, "config", None))
    if config is None:
        return
    if model is not None:
        config.architectures = [original_class(model).__name__]
        config.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), config.dtype)
    config.save_pretrained(folder)
    if model is not None and getattr(model, "_auto_class", None) is not None:
        from transformers.dynamic_module_utils import custom_object_save

        # The code of a class that ships with its checkpoints.
        custom_object_save(original_class(model), folder)
    save_generation_config(model, folder)
