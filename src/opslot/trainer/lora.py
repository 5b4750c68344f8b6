"""LoRA adapters of a run, made by PEFT from the section `lora`."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from opslot._base.errors import ConfigError, list_problems
from opslot._base.logging import get_logger
from opslot.checkpoint.adapters import adapter_layers, add_adapter
from opslot.models._build import classifier_heads
from opslot.models._multimodal.parts import PARTS, parts_of
from opslot.slots import walk_slots
from opslot.trainer.config import LoraConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = get_logger(__name__)

ALL_LINEAR = "all-linear"
# Modules without a forward pass, which PEFT does not copy.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
# Modules in an error.
_MOST_SHOWN = 4
_TASK_TYPES = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}


def add_adapters(model: PreTrainedModel, lora: LoraConfig, base: str | None, revision: str | None = None) -> None:
    """Freeze `model` and add the adapters of `lora`, which have no values yet where the model is on meta.

    Args:
        base, revision: the checkpoint with the model's weights, which the saved adapters name.

    Raises:
        ConfigError: a target that matches no module of the model, or that PEFT does not support.
    """
    import peft

    assert lora.r is not None, "adapters are made if there is a rank"
    alpha: Any = 2 * lora.r if lora.alpha is None else lora.alpha  # PEFT also takes a float
    whole = [*(lora.modules_to_save or ()), *classifier_heads(model)]
    _check_targets(model, lora, whole)
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        target_modules=_linear_layers(model, whole) if lora.target_modules == ALL_LINEAR else lora.target_modules,
        target_parameters=_expert_weights(model) if lora.experts else None,
        modules_to_save=list(dict.fromkeys(whole)) or None,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        rank_pattern=lora.rank_pattern or {},
        alpha_pattern=lora.alpha_pattern or {},
        init_lora_weights=True if lora.init == "kaiming" else lora.init,
        task_type=next(
            (kind for name, kind in _TASK_TYPES.items() if type(model).__name__.endswith(name)), "CAUSAL_LM"
        ),
    )
    # PEFT changes the model before it raises.
    candidates = ", ".join(_candidates(model))
    try:
        with warnings.catch_warnings():
            # `_check_patterns` raises an error below instead of this warning.
            warnings.filterwarnings("ignore", message=".*_pattern keys did not match")
            # PEFT sets `fan_in_fan_out` itself, so the user need not act.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            add_adapter(model, config)
    except ValueError as error:
        raise ConfigError(
            f"PEFT cannot add adapters for lora.target_modules={lora.target_modules}",
            found=str(error),
            hint=f"modules that can have one: {candidates}",
        ) from error
    if not lora.experts and any(hasattr(layer, "parameter_name") for _, layer in adapter_layers(model)):
        raise ConfigError(
            f"PEFT takes lora.target_modules={lora.target_modules} for the experts of {type(model).__name__}",
            hint="set lora.experts: true, or leave out the names of the experts' projections",
        )
    _check_patterns(model, lora)
    config.base_model_name_or_path, config.revision = base, revision


def without_gradient(model: nn.Module) -> list[str]:
    """Layers whose adapters got no gradient in a backward pass, with numbers as `*`: code that reads a layer's weight
    instead of calling the layer does not run its adapter. Frozen adapters are not among them.
    """
    trained = ((path, [p for p in layer.parameters() if p.requires_grad]) for path, layer in adapter_layers(model))
    paths = [path for path, own in trained if own and all(parameter.grad is None for parameter in own)]
    return list(dict.fromkeys(re.sub(r"\b\d+\b", "*", path) for path in paths))


def _check_patterns(model: nn.Module, lora: LoraConfig) -> None:
    paths = [
        f"{path}.{layer.parameter_name}" if hasattr(layer, "parameter_name") else path
        for path, layer in adapter_layers(model)
    ]
    given: dict[str, dict[str, Any]] = {
        "rank_pattern": lora.rank_pattern or {},
        "alpha_pattern": lora.alpha_pattern or {},
    }
    problems = [
        f"lora.{field}: {name} matches no module with an adapter"
        for field, names in given.items()
        for name in names
        if not any(_matches(path, rf"(.*\.)?({name})", True) for path in paths)
    ]
    if problems:
        adapted = dict.fromkeys(path.rsplit(".", 1)[-1] for path in paths)
        raise ConfigError(
            list_problems(f"adapters cannot be added to {type(model).__name__}", problems),
            hint=f"modules with an adapter: {', '.join(adapted)}",
        )


def _expert_weights(model: PreTrainedModel) -> list[str]:
    """Names of the stacked weights of experts, for PEFT's target_parameters."""
    slots = [slot for slot in walk_slots(model) if slot.op_name == "moe_experts"]
    names = {
        f"{slot.path.rsplit('.', 1)[-1]}.{name}": None
        for slot in slots
        for name, parameter in slot.module.named_parameters(recurse=False)
        if parameter.ndim == 3
    }
    if not names:
        raise ConfigError(
            f"lora.experts is set, but opslot finds no experts in {type(model).__name__}",
            hint="set lora.experts: false",
        )
    return list(names)


def _linear_layers(model: PreTrainedModel, whole: Iterable[str]) -> list[str]:
    """Paths of the linear layers that get adapters: not what is trained whole; experts are not among them."""
    paths = [path for path in _linear_paths(model) if not any(_matches(path, n, False) for n in whole)]
    names = sorted({path.rsplit(".", 1)[-1] for path in paths})
    left = {name: "which PEFT takes for the stacked experts" for name in names if _means_experts(model, name)}
    left |= {name: "which PEFT does not adapt in this architecture" for name in names if _is_rejected(model, name)}
    for name, reason in left.items():
        logger.warning("no adapters on %s, %s", name, reason)
    return [path for path in paths if path.rsplit(".", 1)[-1] not in left]


def _linear_paths(model: nn.Module) -> list[str]:
    """Paths of the linear layers but the output head."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()  # type: ignore[operator]
    kinds = (nn.Linear, Conv1D)
    return [p for p, m in model.named_modules() if isinstance(m, kinds) and m is not head and _maps_features(m)]


def _maps_features(module: nn.Module) -> bool:
    """Whether a call of `module` maps [..., in_features] to [..., out_features], if it is a linear layer.

    Some subclasses compute something else, to whose output PEFT's forward cannot add an adapter: the block-diagonal
    projection of DeepSeek-V4, the routers of Llama 4 and Phi-3.5-MoE.
    """
    if not isinstance(module, nn.Linear) or type(module).forward is nn.Linear.forward:
        return True
    if hasattr(module, "quantization"):  # made from a layer with the forward of nn.Linear
        return True
    on_meta = {name: parameter.to("meta") for name, parameter in module.named_parameters()}
    x = torch.empty(2, 3, module.in_features, device="meta", dtype=module.weight.dtype)
    try:
        output = torch.func.functional_call(module, on_meta, x)
    # Whatever the class raises for an input of this shape.
    except Exception:
        return False
    return isinstance(output, torch.Tensor) and output.shape == (2, 3, module.out_features)


def _means_experts(model: PreTrainedModel, name: str) -> bool:
    """Whether PEFT, for checkpoints of Transformers 4, takes `name` for a projection of stacked experts."""
    import peft
    from peft.utils import transformers_weight_conversion

    config = peft.LoraConfig(target_modules=[name])
    try:
        transformers_weight_conversion.convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # such projections must be named together
        return True
    return bool(config.target_parameters)


def _is_rejected(model: PreTrainedModel, name: str) -> bool:
    """Whether PEFT raises for a layer of this name: fast kernels of Mamba read the weight of `out_proj`."""
    import peft
    from peft.tuners import tuners_utils

    try:
        tuners_utils._check_lora_target_modules_mamba(peft.LoraConfig(), model, name)
    except ValueError:
        return True
    return False


def _check_targets(model: nn.Module, lora: LoraConfig, whole: Iterable[str]) -> None:
    """Check that each target matches; PEFT only raises if none does, and only warns of tied weights."""
    named = {"lora.modules_to_save": {name: name for name in whole}}
    targets = lora.target_modules
    if isinstance(targets, list):
        named["lora.target_modules"] = {name: name for name in targets}
    elif targets != ALL_LINEAR:
        named["lora.target_modules"] = {targets: targets}
    shared = _tied(model)
    problems = []
    for field, names in named.items():
        for name in names:
            is_pattern = field == "lora.target_modules" and isinstance(targets, str)
            found = [path for path, _ in model.named_modules() if path and _matches(path, name, is_pattern)]
            is_whole = field == "lora.modules_to_save"
            if name in PARTS and is_whole and not found and (modules := _modules_of_part(model, name)):
                shown = ", ".join(modules[:_MOST_SHOWN]) + (", ..." if len(modules) > _MOST_SHOWN else "")
                problems.append(f"{field}: {name} is a part, and not a module; name its modules {shown}")
            elif (
                name in PARTS
                and not (found and (is_pattern or is_whole))
                and (pattern := _pattern_of_part(model, name))
            ):
                problems.append(f"{field}: {name} is a part, and not a linear layer; set it to '{pattern}'")
            elif not found:
                problems.append(f"{field}: {name} matches no module")
                if is_pattern and any(_matches(path, name, False) for path, _ in model.named_modules()):
                    problems[-1] += f" (a string is a regular expression for full names; use [{name}] for a name)"
                elif is_pattern:
                    problems[-1] += f"; full names are such as {', '.join(_example_paths(model))}"
            problems += [
                f"{field}: {path} is a list of modules; name each of them, such as {path}.0"
                for path in found
                if is_whole and isinstance(model.get_submodule(path), _CONTAINERS)
            ]
            problems += [f"{field}: {path} shares its weight with another module" for path in found if path in shared]
            if field == "lora.target_modules":
                problems += [
                    f"{field}: {path} is a {type(module).__name__}, which computes something else than a linear layer"
                    for path, module in ((path, model.get_submodule(path)) for path in found)
                    if not _maps_features(module)
                ]
    if problems:
        every = f"; {ALL_LINEAR} selects every linear layer but the output head" if targets != ALL_LINEAR else ""
        raise ConfigError(
            list_problems(f"adapters cannot be added to {type(model).__name__}", problems),
            hint=f"modules that can have one: {', '.join(_candidates(model))}{every}",
        )


def _pattern_of_part(model: nn.Module, part: str) -> str:
    """A regular expression for the linear layers of a part; "" where it has none."""
    parameters = set(parts_of(model)[part])
    paths = [path for path in _linear_paths(model) if f"{path}.weight" in parameters]
    if not paths:
        return ""
    levels = zip(*(path.split(".")[:-1] for path in paths), strict=False)
    start = r"\.".join(names[0] for names in itertools.takewhile(lambda names: len({*names}) == 1, levels))
    names = dict.fromkeys(path.rsplit(".", 1)[-1] for path in paths)
    return rf"{start}\..*({'|'.join(names)})"


def _modules_of_part(model: nn.Module, part: str) -> list[str]:
    """Paths of the largest modules with parameters of a part alone."""
    parameters = set(parts_of(model)[part])
    inside: list[str] = []
    for path, module in model.named_modules():
        own = {f"{path}.{name}" for name, _ in module.named_parameters()}
        is_inside = bool(own) and own <= parameters and not isinstance(module, _CONTAINERS)
        if path and is_inside and not path.startswith(tuple(f"{outer}." for outer in inside)):
            inside.append(path)
    return inside


def _matches(path: str, name: str, is_pattern: bool) -> bool:
    if is_pattern:
        try:
            return re.fullmatch(name, path) is not None
        except re.error as error:
            raise ConfigError(
                f"lora.target_modules={name!r} is not a valid regular expression",
                found=str(error),
                hint="escape its special characters, or list names of modules",
            ) from error
    return path == name or path.endswith(f".{name}")


def _candidates(model: nn.Module) -> list[str]:
    """Last names of the modules that PEFT adapts, in the model's order."""
    return list(dict.fromkeys(path.rsplit(".", 1)[-1] for path in _adaptable(model)))


def _example_paths(model: nn.Module) -> list[str]:
    """Paths of modules that PEFT adapts: one of each part, at most three."""
    part_of = {name: part for part, names in parts_of(model).items() for name in names}
    by_part = {part_of.get(f"{path}.weight"): path for path in reversed(_adaptable(model))}
    return [*by_part.values()][::-1][:3]


def _adaptable(model: nn.Module) -> list[str]:
    """Paths of the modules that PEFT adapts."""
    from transformers.pytorch_utils import Conv1D

    kinds = (nn.Linear, nn.Embedding, Conv1D)
    tied = _tied(model)
    return [
        path for path, m in model.named_modules() if isinstance(m, kinds) and path not in tied and _maps_features(m)
    ]


def _tied(model: nn.Module) -> set[str]:
    """Paths of modules whose weight is another module's too."""
    by_weight: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            by_weight.setdefault(id(weight), []).append(path)
    return {path for paths in by_weight.values() if len(paths) > 1 for path in paths}
