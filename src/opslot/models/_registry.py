"""Which architectures opslot has generated classes for, and the class for each `architectures` entry of a config."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from opslot._base.errors import ConfigError, PatchError
from opslot._base.logging import get_logger
from opslot._base.plugins import load_entry_points
from opslot.models.discovery.supported import supported_architectures
from opslot.patchgen import PatchConfig, materialize, register_patch
from opslot.patchgen.materialization import GENERATED_PACKAGE, NoPatchError
from opslot.patchgen.names import architecture_in, is_elsewhere, modeling_module
from opslot.patchgen.source import installed_release
from opslot.slots.protocol import LOST_SLOTS, SubModel, sub_model

logger = get_logger(__name__)

ENTRY_POINT_GROUP = "opslot.architectures"


class Registry:
    """Factories by model_type."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._factories: dict[str, Callable[..., Any]] = {}

    def register(self, name: str, *, replace: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator that registers a factory as `name`.

        Raises:
            ConfigError: the name has another factory already, unless `replace`.
        """

        def add(factory: Callable[..., Any]) -> Callable[..., Any]:
            known = self._factories.get(name, factory)
            if known is not factory and not replace:
                raise ConfigError(
                    f"{self._what} {name!r} is already registered",
                    found=f"{known.__module__}.{known.__qualname__}",
                    hint="pass replace=True to replace it",
                )
            self._factories[name] = factory
            return factory

        return add

    def get(self, name: str) -> Callable[..., Any]:
        """The factory of `name`; ConfigError naming the others if there is none."""
        if name not in self._factories:
            names = sorted({*self._factories, *supported_architectures()})
            near = difflib.get_close_matches(name, names, 1)
            raise ConfigError(
                f"opslot has no {self._what} {name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""),
                found=f"it is not among the {len(names)} registered or supported ones; patchgen --list prints these",
                hint=(
                    "set OPSLOT_BACKEND=hf to train with its own class as it is, or declare slots in a class of your "
                    "own (docs/architectures.md), or add the architecture (CONTRIBUTING.md)"
                ),
            )
        return self._factories[name]

    def __contains__(self, name: str) -> bool:
        return name in self._factories


MODELING_REGISTRY = Registry("model_type")
MODEL_CONFIG_REGISTRY = Registry("model_type")
MODEL_PROCESSOR_REGISTRY = Registry("processor class")


@dataclass(frozen=True)
class Architecture:
    """An architecture with generated classes.

    Attributes:
        name: Transformers' folder, e.g. "qwen3_moe", or `architecture_from` of the name of another module.
        converters: `(model) -> checkpoint converters` for layouts that differ from the model's parameters; None if
            none do.
        plan: `(model) -> ParallelPlan`; None for one that shards the experts that have slots.
    """

    name: str
    converters: Callable[[Any], list[Any]] | None = None
    plan: Callable[[Any], Any] | None = None

    @property
    def upstream(self) -> str:
        """The module whose classes the generated ones replace."""
        return modeling_module(self.name)

    @property
    def generated(self) -> str:
        return f"{GENERATED_PACKAGE}.{self.name}"

    def generated_class(self, class_name: str) -> type | None:
        """The generated class of that name, or None."""
        return getattr(_generated(self.generated), class_name, None)

    def upstream_class(self, class_name: str) -> type | None:
        """Transformers' own class of that name, or None."""
        return getattr(importlib.import_module(self.upstream), class_name, None)


@cache
def _generated(name: str) -> ModuleType:
    module = importlib.import_module(name)
    if lost := getattr(module, LOST_SLOTS, ""):
        logger.warning("%s", lost)
    return module


ARCHITECTURES: dict[str, Architecture] = {}
"""Architectures that a package or the user registered."""


def find_architecture(name: str) -> Architecture | None:
    """The architecture of a folder under `transformers/models`: registered, or with slots that discovery finds.

    None if there is neither.
    """
    _load_entry_points()
    return ARCHITECTURES.get(name) or _discover(name)


@cache
def _discover(name: str) -> Architecture | None:
    try:
        materialize(name)
    except NoPatchError:
        return None
    except PatchError as error:
        logger.warning("slots were found in %s, but its module could not be generated with them: %s", name, error)
        return None
    return Architecture(name)


@cache
def _load_entry_points() -> None:
    """Let other packages register their architectures."""
    load_entry_points(ENTRY_POINT_GROUP)


def architecture_of(cls: type, generated: bool) -> Architecture | None:
    """The architecture of a generated class, or of a Transformers class that has a generated counterpart."""
    name = _generated_name(cls.__module__) if generated else architecture_in(cls.__module__)
    if name is None:
        return None
    return Architecture(name) if is_elsewhere(name) else find_architecture(name)


def _generated_name(module: str) -> str | None:
    """The architecture of a generated module; None for others."""
    package, _, name = module.rpartition(".")
    return name if package == GENERATED_PACKAGE else None


def converters_of(model: Any) -> list[Any] | None:
    """Checkpoint converters of a model: those of its class, else of its architecture; None if there are none.

    A class has them as the static method `_create_checkpoint_tensor_converter(model)`, which returns one or a list.
    """
    create = getattr(model, "_create_checkpoint_tensor_converter", None)
    if create is not None:
        found = create(model)
        return list(found) if isinstance(found, list | tuple) else [found]
    _load_entry_points()
    # The model_type of a sub-model with its own config is not its architecture's, as llama4_text.
    modules = [cls.__module__ for cls in type(model).__mro__]
    folders = [found for name in modules if (found := _generated_name(name) or architecture_in(name))]
    names = (*folders[:1], model.config.model_type)
    architecture = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    return architecture.converters(model) if architecture and architecture.converters else None


def serve_model_type(model_type: str) -> bool:
    """Whether `MODELING_REGISTRY` has a model_type, after its architecture was looked for."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    _load_entry_points()
    if model_type not in MODELING_REGISTRY and model_type in CONFIG_MAPPING_NAMES:
        architecture = find_architecture(folder_of_models(model_type))
        if architecture is not None:
            _serve(architecture, model_type)
    return model_type in MODELING_REGISTRY


def trained_config(config: Any, class_name: str) -> Any:
    """The config of the model that trains in a model of class `class_name`: of its sub-model, or `config` itself."""
    declared = declared_sub_model(config.model_type, class_name)
    return config if declared is None else getattr(config, declared.config)


def declared_sub_model(model_type: str, class_name: str) -> SubModel | None:
    """The sub-model that trains in a model of class `class_name`; None where the model itself trains."""
    known = serve_model_type(model_type)
    return sub_model(MODELING_REGISTRY.get(model_type)(class_name)) if known else None


def folder_of_models(model_type: str) -> str:
    """The architecture that has the models of a model_type, by default the folder of its config.

    A model_type may have its own config and another's models, as InternLM3 has Llama's, or its models in one of several
    files. Its model's class is imported to find out, only if the folder holds no models.
    """
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

    folder: str = model_type_to_module_name(model_type)
    if installed_release().path(modeling_module(folder)).is_file():
        return folder
    for kind in ("FOR_CAUSAL_LM_", "FOR_IMAGE_TEXT_TO_TEXT_", "FOR_SEQ_TO_SEQ_CAUSAL_LM_", "FOR_MASKED_LM_", ""):
        found = getattr(modeling_auto, f"MODEL_{kind}MAPPING").get(CONFIG_MAPPING[model_type], None)
        cls = found[0] if isinstance(found, tuple) else found
        if arch := architecture_in(getattr(cls, "__module__", "")):
            return arch
    return folder


def register_architecture(
    name: str,
    converters: Callable[[Any], list[Any]] | None = None,
    *,
    patch: PatchConfig | None = None,
    parallel_plan: Callable[[Any], Any] | None = None,
    replace: bool = False,
) -> Architecture:
    """Register an architecture, in `opslot.models.<name>` or from an entry point of the group `opslot.architectures`.

    Args:
        name: Transformers' folder name, which is also its model_type.
        converters: `(model) -> list of CheckpointTensorConverter or SlicingConverter`.
        patch: edits beside those that discovery finds, or all of them with `discover=False`. A folder
            `opslot/models/<name>` has them in `patch.py` instead.
        parallel_plan: `(model) -> ParallelPlan`; default: shard the experts that have slots.
        replace: replace an architecture of that name.

    Raises:
        ConfigError: the name is already registered, unless `replace`.
    """
    architecture = Architecture(name, converters, parallel_plan)
    if not replace and ARCHITECTURES.get(name, architecture) != architecture:
        raise ConfigError(
            f"architecture {name!r} is already registered",
            found=repr(ARCHITECTURES[name]),
            hint="pass replace=True to replace it",
        )
    if patch is not None:
        register_patch(name, patch, replace=replace)
    ARCHITECTURES[name] = architecture
    _serve(architecture, name)
    return architecture


def _serve(architecture: Architecture, model_type: str) -> None:
    @MODELING_REGISTRY.register(model_type, replace=True)
    def modeling(class_name: str) -> type:
        found = architecture.generated_class(class_name)
        if found is None:
            names = getattr(_generated(architecture.generated), "__all__", ())
            raise ConfigError(
                f"{architecture.generated} has no class {class_name!r}",
                found=", ".join(names),
                hint="correct `architectures` in config.json",
            )
        return found
