"""LoRA adapters of PEFT in a model: the base model below them, initial values, saving them alone or merged.

The model stays a Transformers model; PEFT's layers are in the places of the modules that they wrap. PEFT is imported
only for models that have adapters.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opslot._base.errors import CheckpointError
from opslot._base.hub import is_repo_id, local_model
from opslot._base.logging import get_logger
from opslot.checkpoint.folder import save_generation_config, staged_folder
from opslot.checkpoint.initialize import MeshFreeDraws, materialize
from opslot.checkpoint.model_tensors import clean_fqn
from opslot.checkpoint.safetensors_file import TensorSpec, write_safetensors
from opslot.distributed import is_first_rank, on_all_ranks
from opslot.distributed.dtensors import full_tensor, local_tensor
from opslot.slots.protocol import trained_model

logger = get_logger(__name__)

ADAPTER = "default"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
FROM_WEIGHTS = ("pissa", "olora")
"""PEFT's `init_lora_weights` that change the base weights."""
_FACTORS = ("lora_A", "lora_B")


def has_adapters(model: nn.Module) -> bool:
    """Whether `model` has adapters of PEFT."""
    return bool(getattr(model, "peft_config", None))


def without_wrapper(model: Any) -> Any:
    """The Transformers model in a PeftModel; any other model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The LoRA layers of `model` by their paths."""
    for path, module in model.named_modules():
        if hasattr(module, "get_delta_weight") and hasattr(module, "base_layer"):
            yield path, module


def trained_copies(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules of `modules_to_save`, by their paths: the original and its trained copy."""
    for path, module in model.named_modules():
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            yield path, module


@contextlib.contextmanager
def base_model(model: Any, *, trained: bool = False) -> Iterator[None]:
    """Inside, `model` has the modules and the names that it had without adapters.

    Args:
        trained: with the trained copies of `modules_to_save` instead of the originals.
    """
    inner: dict[str, Any] = {}
    for path, layer in adapter_layers(model):
        if _outermost(path, model) == path:
            inner[path] = layer.get_base_layer()
    for path, wrapper in trained_copies(model):
        inner[path] = wrapper.modules_to_save[ADAPTER] if trained else wrapper.original_module
    wrappers: list[tuple[nn.Module, str, nn.Module]] = []
    for path, module in inner.items():
        owner, _, key = path.rpartition(".")
        parent = model.get_submodule(owner)
        wrappers.append((parent, key, parent.get_submodule(key)))
        parent._modules[key] = module
    try:
        yield
    finally:
        for parent, key, wrapper in wrappers:
            parent._modules[key] = wrapper


def initialize_adapters(model: Any, seed: int | None = None, device: torch.device | str | None = None) -> None:
    """Initialize the adapters as PEFT does, and copy the base weights to the trained copies of `modules_to_save`.

    The values depend on the seed and on names, not on how the model is sharded. Call it when the base weights are set.

    Args:
        seed: default torch's initial seed.
        device: where meta tensors get memory; None is the CPU, or a DTensor's mesh device.
    """
    materialize(model, device)
    draws = MeshFreeDraws(torch.initial_seed() if seed is None else seed)
    model = without_wrapper(model)
    init = model.peft_config[ADAPTER].init_lora_weights
    devices = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
    with torch.no_grad(), torch.random.fork_rng(devices):
        for path, layer in adapter_layers(model):
            if init in FROM_WEIGHTS:
                # PEFT has computed them, and subtracted their product from the weight.
                for name in _FACTORS:
                    start = getattr(layer, name)[ADAPTER].weight.detach().clone()
                    layer.register_buffer(f"initial_{name}", start, persistent=False)
            else:
                draws.run(clean_fqn(path), layer, lambda layer: _reset(layer, init))
            if (magnitude := _magnitude(layer)) is not None:
                weight = local_tensor(layer.get_base_layer().weight)
                local_tensor(magnitude).copy_(torch.linalg.norm(weight, dim=1))
        for _, wrapper in trained_copies(model):
            tensors = wrapper.original_module.state_dict()
            for name, tensor in wrapper.modules_to_save[ADAPTER].state_dict().items():
                local_tensor(tensor).copy_(local_tensor(tensors[name]))


def _magnitude(layer: Any) -> Tensor | None:
    """The norms of the weights of each output that DoRA trains; None without DoRA."""
    vectors = getattr(layer, "lora_magnitude_vector", {})
    return vectors[ADAPTER].weight if ADAPTER in vectors else None


def _reset(layer: Any, init: bool | str) -> None:
    layer.reset_lora_parameters(ADAPTER, init)


def merged_weights(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """What to add to the weights of the base model, by FQN, so that they include the adapters.

    Every rank calls each function, in one order: sharded adapters are gathered.
    """
    return {
        clean_fqn(f"{_outermost(path, model)}.{getattr(layer, 'parameter_name', 'weight')}"): partial(_delta, layer)
        for path, layer in adapter_layers(model)
    }


def _outermost(path: str, model: nn.Module) -> str:
    """The path of the adapters around the one at `path`: those on several weights of a module are nested."""
    owner, _, key = path.rpartition(".")
    is_nested = key == "base_layer" and hasattr(model.get_submodule(owner), "get_delta_weight")
    return _outermost(owner, model) if is_nested else path


def _delta(layer: Any) -> Tensor:
    """What an adapter adds to its weight, gathered over the ranks, in float32."""
    adapters = [module for name in layer.adapter_layer_names for module in getattr(layer, name).modules()]
    own = [(m, key, p) for m in adapters for key, p in m._parameters.items() if p is not None]
    try:
        for module, key, parameter in own:
            module._parameters[key] = nn.Parameter(full_tensor(parameter.detach()).float(), requires_grad=False)
        delta = layer.get_delta_weight(ADAPTER).detach()
        if (magnitude := _magnitude(layer)) is None:
            return delta
        weight = full_tensor(layer.get_base_layer().weight.detach()).to(delta)
        added = weight + delta
        return (magnitude / torch.linalg.norm(added, dim=1)).unsqueeze(1) * added - weight
    finally:
        for module, key, parameter in own:
            module._parameters[key] = parameter


def add_adapter(model: Any, config: Any) -> None:
    """Add the adapters of a `peft.PeftConfig` to a Transformers model; active and trained.

    `model.add_adapter` of Transformers 5.24 raises for releases of PEFT before 0.22.
    """
    from peft import inject_adapter_in_model

    inject_adapter_in_model(config, model, ADAPTER)
    # Transformers asks for it, e.g. in save_pretrained.
    model._hf_peft_config_loaded = True


def load_adapter(model: Any, folder: str | Path) -> None:
    """Add the adapters in `folder`, which may also be adapters of the hub, to `model`, which has its base weights.

    Raises:
        ConfigError: adapters of the hub that cannot be downloaded.
        CheckpointError: no adapter of PEFT in the folder, an incomplete one, or one of another model.
    """
    folder = local_model(folder)
    file = folder / ADAPTER_WEIGHTS
    if not (folder / ADAPTER_CONFIG).is_file() or not file.is_file():
        raise CheckpointError(
            f"{str(folder)!r} is not a folder of adapters", hint=f"it needs {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}"
        )
    from peft import PeftConfig, set_peft_model_state_dict
    from safetensors.torch import load_file

    try:
        add_adapter(model, PeftConfig.from_pretrained(str(folder)))
        tensors = {name.removeprefix("base_model.model."): tensor for name, tensor in load_file(file).items()}
        result: Any = set_peft_model_state_dict(model, tensors, ADAPTER)
    except torch.OutOfMemoryError:
        raise
    # Of PEFT's constructors, and of damaged files.
    except Exception as error:
        raise CheckpointError(
            f"the adapters in {str(folder)!r} cannot be read, or do not fit the model",
            found=str(error) or type(error).__name__,
            hint="give the model that they were trained on, or copy or download them again",
        ) from error
    if result.unexpected_keys:
        result = _load_by_own_names(model, tensors)
    if result.unexpected_keys:
        raise CheckpointError(
            f"the adapters in {str(folder)!r} do not fit the model",
            found=f"no module for {result.unexpected_keys[0]} and {len(result.unexpected_keys) - 1} others",
            hint="give the model that they were trained on",
        )
    # Beside the weights of the base model and of other adapters.
    own = re.compile(rf"\.(lora_\w+|modules_to_save)\.{ADAPTER}(\.|$)")
    missing = [name for name in result.missing_keys if own.search(name)]
    if missing:
        raise CheckpointError(
            f"the adapters in {str(folder)!r} are incomplete",
            found=f"no values for {missing[0]} and {len(missing) - 1} others",
            hint=f"copy or download {ADAPTER_WEIGHTS} again, with the {ADAPTER_CONFIG} that it was saved with",
        )
    scales = {path: layer.scaling[ADAPTER] for path, layer in adapter_layers(model) if ADAPTER in layer.scaling}
    if wrong := [path for path, scale in scales.items() if not math.isfinite(scale)]:
        raise CheckpointError(
            f"the adapters in {str(folder)!r} have no finite scale",
            found=f"lora_alpha or alpha_pattern in {ADAPTER_CONFIG} makes that of {wrong[0]} {scales[wrong[0]]}",
            hint="set the value that the adapters were trained with",
        )
    if not_finite := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        logger.warning(
            "%d tensors of %s hold NaN or infinity, e.g. %s; so will the outputs", len(not_finite), file, not_finite[0]
        )


def _load_by_own_names(model: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Load adapters by the names of the model's own modules; returns the missing and the unexpected keys.

    PEFT renames them as the weights of a checkpoint, and some renamings match the model's own names too (Inkling 2).
    """
    named = {
        re.sub(r"(\.lora_(?:embedding_)?[AB])\b", rf"\1.{ADAPTER}", name): value for name, value in tensors.items()
    }
    return model.load_state_dict(named, strict=False)


def save_adapter(model: Any, folder: str | Path) -> Path:
    """Save the adapters of `model` in PEFT's format, for `PeftModel.from_pretrained(base, folder)`.

    The folder appears whole or not at all. Every rank calls it; sharded tensors are gathered and rank 0 writes.

    Raises:
        CheckpointError: the folder cannot be written or the disk is full.
    """
    from peft import get_peft_model_state_dict

    model, folder = without_wrapper(model), Path(folder)
    config = copy.deepcopy(model.peft_config[ADAPTER])
    own = {
        clean_fqn(name): tensor.detach() for name, tensor in model.state_dict().items() if ADAPTER in name.split(".")
    }
    named = get_peft_model_state_dict(model, own, ADAPTER, save_embedding_layers=False)
    whole = {
        f"base_model.model.{name}": full_tensor(tensor).cpu().contiguous() for name, tensor in sorted(named.items())
    }
    if config.init_lora_weights in FROM_WEIGHTS:
        _subtract_initial(model, config, whole)
    config.inference_mode = True
    if trained_model(model) is not model:
        _name_targets_in_full(model, config)

    def write() -> None:
        if not is_first_rank():
            return
        specs = [TensorSpec.of(name, tensor) for name, tensor in whole.items()]
        with staged_folder(folder, sum(spec.nbytes for spec in specs)) as stage:
            write_safetensors(stage / ADAPTER_WEIGHTS, specs, whole.values())
            config.save_pretrained(str(stage))
            # Of the merged model; PEFT reads the base model's.
            save_generation_config(model, stage)

    on_all_ranks(write) if any(isinstance(tensor, DTensor) for tensor in own.values()) else write()
    return folder


def _name_targets_in_full(model: nn.Module, config: Any) -> None:
    """Let the config name each adapted module and parameter by its path, which no part that this model is built
    without has (the talker of omni models)."""
    layers = [(path, getattr(layer, "parameter_name", None)) for path, layer in adapter_layers(model)]
    if config.target_modules:
        config.target_modules = sorted(clean_fqn(path) for path, parameter in layers if parameter is None)
    if config.target_parameters:
        config.target_parameters = sorted(
            f"{clean_fqn(_outermost(path, model))}.{parameter}" for path, parameter in layers if parameter is not None
        )


def _subtract_initial(model: nn.Module, config: Any, tensors: dict[str, Tensor]) -> None:
    """Make adapters of the changed base weights those of the unchanged ones: s (B A - B0 A0), of twice the rank."""
    for path, layer in adapter_layers(model):
        for name, dim, sign in zip(_FACTORS, (0, 1), (1, -1), strict=True):
            key, initial = f"base_model.model.{clean_fqn(path)}.{name}.weight", getattr(layer, f"initial_{name}")
            tensors[key] = torch.cat([tensors[key], sign * initial.to(tensors[key])], dim).contiguous()
    factor = math.sqrt(2) if config.use_rslora else 2
    config.r, config.lora_alpha = 2 * config.r, factor * config.lora_alpha
    config.rank_pattern = {name: 2 * rank for name, rank in config.rank_pattern.items()}
    config.alpha_pattern = {name: factor * alpha for name, alpha in config.alpha_pattern.items()}
    config.init_lora_weights = True


def base_folder(adapter_config: Mapping[str, Any], *, weights: bool = True) -> Path | None:
    """The folder of the base model that an adapter_config.json names, by `local_model`; None if it names none."""
    base, revision = adapter_config.get("base_model_name_or_path"), adapter_config.get("revision")
    if base is None:
        return None
    return local_model(f"{base}@{revision}" if revision and is_repo_id(base) else base, weights=weights)


def read_adapter_config(folder: str | Path) -> dict[str, Any]:
    """adapter_config.json of a folder; empty if there is none.

    Raises:
        CheckpointError: it is not a JSON object, or names a base model by something else than text.
    """
    file = Path(folder) / ADAPTER_CONFIG
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is not valid JSON", found=str(error), hint="copy or download it again"
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("base_model_name_or_path"), str | None):
        raise CheckpointError(
            f"{file} is not a config of adapters",
            found="base_model_name_or_path is not text" if isinstance(found, dict) else f"a {type(found).__name__}",
            hint="copy or download it again",
        )
    return found
