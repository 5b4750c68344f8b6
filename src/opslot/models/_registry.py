"""Which architectures opslot knows, and the class that serves each `architectures` entry of a config."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from opslot._base.errors import ConfigError


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
                f"opslot has no {self._what} {name!r}{hint}; it has {', '.join(sorted(self._factories))}.\n"
                "  to do: set OPSLOT_BACKEND=hf to train with Transformers' own class, or add the architecture "
                "(CONTRIBUTING.md, one folder)"
            )
        return self._factories[name]

    def __contains__(self, name: str) -> bool:
        return name in self._factories

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._factories))


MODELING_REGISTRY = Registry("model_type")
MODEL_CONFIG_REGISTRY = Registry("patch for model_type")
MODEL_PROCESSOR_REGISTRY = Registry("processor")


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
        """What `parallel_plan.py` in the architecture's folder divides in `model`; None where there is no such file."""
        module = f"opslot.models.{self.name}.parallel_plan"
        if importlib.util.find_spec(module) is None:
            return None
        return importlib.import_module(module).get_parallel_plan(model)

    def generated_class(self, class_name: str) -> type | None:
        """The generated class of that name, or None."""
        return getattr(importlib.import_module(self.generated), class_name, None)

    def upstream_class(self, class_name: str) -> type | None:
        """Transformers' own class of that name, or None."""
        return getattr(importlib.import_module(self.upstream), class_name, None)


ARCHITECTURES: dict[str, Architecture] = {}


def register_architecture(name: str, converters: Callable[[Any], list[Any]] | None = None) -> Architecture:
    """File an architecture whose folder holds `patch.py`: its generated classes serve its model_type.

    Args:
        name: Transformers' folder name, which is also its model_type.
        converters: `(model) -> list of CheckpointTensorConverter`.
    """
    architecture = Architecture(name, converters)
    ARCHITECTURES[name] = architecture

    @MODELING_REGISTRY.register(name)
    def modeling(class_name: str) -> type:
        found = architecture.generated_class(class_name)
        if found is None:
            module = importlib.import_module(architecture.generated)
            raise ConfigError(
                f"architecture {class_name!r} is not in {architecture.generated}; it has "
                f"{', '.join(n for n in getattr(module, '__all__', ()))}"
            )
        return found

    @MODEL_CONFIG_REGISTRY.register(name)
    def config() -> type:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return CONFIG_MAPPING[name]

    return architecture
