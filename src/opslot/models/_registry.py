"""Which architectures opslot knows, and the class that serves each `architectures` entry of a config."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opslot._base.errors import ConfigError, PatchError
from opslot._base.logging import get_logger

logger = get_logger(__name__)


class Registry:
    """Factories by name, e.g. model_type or processor class name."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._factories: dict[str, Callable[..., Any]] = {}

    def register(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator that files a factory under `name`; ConfigError when the name is taken by another factory."""

        def add(factory: Callable[..., Any]) -> Callable[..., Any]:
            if self._factories.setdefault(name, factory) is not factory:
                raise ConfigError(f"{self._what} {name!r} is registered already")
            return factory

        return add

    def get(self, name: str) -> Callable[..., Any]:
        """The factory of `name`; ConfigError naming what exists."""
        if name not in self._factories:
            near = difflib.get_close_matches(name, self._factories, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(
                f"opslot has no {self._what} {name!r}{hint}; it has {', '.join(sorted(self._factories))}.",
                hint=(
                    "set OPSLOT_BACKEND=hf to train with Transformers' own class, or add the "
                    "architecture (CONTRIBUTING.md, one folder)"
                ),
            )
        return self._factories[name]

    def __contains__(self, name: str) -> bool:
        return name in self._factories

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._factories))


MODELING_REGISTRY = Registry("model_type")
MODEL_CONFIG_REGISTRY = Registry("patch for model_type")


@dataclass(frozen=True)
class Architecture:
    """What one architecture folder declares.

    Attributes:
        name: Transformers' folder and model_type, e.g. "qwen3_moe".
        converters: `(model) -> checkpoint converters` for layouts that differ from the model's parameters; None when
            none do.
        upstream: the Transformers module that the generated one stands for.
    """

    name: str
    converters: Callable[[Any], list[Any]] | None = None

    @property
    def upstream(self) -> str:
        return f"transformers.models.{self.name}.modeling_{self.name}"

    @property
    def generated(self) -> str:
        return f"opslot.generated.{self.name}"

    def parallel_plan(self, model: Any) -> Any:
        """What `parallel_plan.py` in its folder divides in `model`, else the weights of experts that stand in slots.

        None where there is neither.
        """
        module = f"opslot.models.{self.name}.parallel_plan"
        if self.name in ARCHITECTURES and importlib.util.find_spec(module) is not None:
            return importlib.import_module(module).get_parallel_plan(model)
        from opslot.models._common.parallel import experts_in_slots

        return experts_in_slots(model)

    def generated_class(self, class_name: str) -> type | None:
        """The generated class of that name, or None."""
        return getattr(importlib.import_module(self.generated), class_name, None)

    def upstream_class(self, class_name: str) -> type | None:
        """Transformers' own class of that name, or None."""
        return getattr(importlib.import_module(self.upstream), class_name, None)


ARCHITECTURES: dict[str, Architecture] = {}
_ported: dict[str, Architecture | None] = {}


def find_architecture(name: str) -> Architecture | None:
    """The architecture of a folder under `transformers/models`.

    One with a patch of its own, else one in whose source slots are found (`opslot port`), else None.
    """
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    if name not in _ported:
        _ported[name] = _port(name)
    return _ported[name]


def _port(name: str) -> Architecture | None:
    from opslot.models.discovery.engine import patch_of
    from opslot.patchgen import materialize

    patch = patch_of(name)
    if patch is None:
        return None
    try:
        materialize(name, patch)
    except PatchError as error:
        logger.warning("slots were found in the code of %s, but it could not be generated with them: %s", name, error)
        return None
    logger.info("%s has no patch of its own; `opslot port %s` shows the slots found in its code", name, name)
    return Architecture(name)


_UPSTREAM = re.compile(r"transformers\.models\.(\w+)\.modeling_\1")
_GENERATED = re.compile(r"opslot\.generated\.(\w+)")


def architecture_of(cls: type, generated: bool) -> Architecture | None:
    """The architecture that a generated class belongs to, or one of upstream's that a generated one can stand for."""
    found = (_GENERATED if generated else _UPSTREAM).fullmatch(cls.__module__)
    return find_architecture(found.group(1)) if found else None


def serve_model_type(model_type: str) -> bool:
    """Whether `MODELING_REGISTRY` serves a model_type, now that slots were looked for in its code if need be."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if model_type not in MODELING_REGISTRY and model_type in CONFIG_MAPPING_NAMES:
        architecture = find_architecture(_folder_of_models(model_type))
        if architecture is not None:
            _serve(architecture, model_type)
    return model_type in MODELING_REGISTRY


def _folder_of_models(model_type: str) -> str:
    """The folder under `transformers/models` that holds the models of a model_type.

    A model_type may have a config of its own and another's models, as InternLM3 has Llama's: its language model's class
    tells, which is imported only where the model_type's own folder holds no models.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    folder: str = model_type_to_module_name(model_type)
    package = importlib.util.find_spec(f"transformers.models.{folder}")
    places = package.submodule_search_locations if package is not None else None
    if any(Path(place, f"modeling_{folder}.py").is_file() for place in places or ()):
        return folder
    cls = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[model_type], None)
    found = _UPSTREAM.fullmatch(getattr(cls, "__module__", ""))
    return found.group(1) if found else folder


def register_architecture(name: str, converters: Callable[[Any], list[Any]] | None = None) -> Architecture:
    """File an architecture whose folder holds `patch.py`: its generated classes serve its model_type.

    Args:
        name: Transformers' folder name, which is also its model_type.
        converters: `(model) -> list of CheckpointTensorConverter`.
    """
    architecture = Architecture(name, converters)
    ARCHITECTURES[name] = architecture
    _serve(architecture, name)
    return architecture


def _serve(architecture: Architecture, model_type: str) -> None:
    @MODELING_REGISTRY.register(model_type)
    def modeling(class_name: str) -> type:
        found = architecture.generated_class(class_name)
        if found is None:
            module = importlib.import_module(architecture.generated)
            raise ConfigError(
                f"architecture {class_name!r} is not in {architecture.generated}; it has "
                f"{', '.join(n for n in getattr(module, '__all__', ()))}"
            )
        return found

    @MODEL_CONFIG_REGISTRY.register(model_type)
    def config() -> type:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return CONFIG_MAPPING[model_type]
