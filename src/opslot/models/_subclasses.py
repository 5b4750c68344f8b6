"""Slots for instances of classes that the user, or code that ships with a checkpoint, derived from Transformers'."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from opslot.models._registry import architecture_of
from opslot.slots.protocol import PREFIX, derived_from, set_derived_from


class Derived(NamedTuple):
    """What `derived` found for a class.

    Attributes:
        base: the class of Transformers that it derives from.
        generated: the class with slots for `base`.
    """

    base: type
    generated: type


def derived(cls: type) -> Derived | None:
    """The class of a known architecture that `cls`, of another package, derives from; None if there is none."""
    if cls.__module__.startswith("transformers."):
        # An architecture that builds on another's classes, and has no slots in its module.
        return None
    for base in cls.__mro__[1:]:
        architecture = architecture_of(base, generated=False)
        generated = architecture.generated_class(base.__name__) if architecture is not None else None
        if generated is not None:
            return Derived(base, generated)
    return None


@cache
def with_slots(cls: type) -> type:
    """A class like `cls` whose methods call, by `super()`, those of the generated class; the same for each call."""
    found = derived(cls)
    assert found is not None, cls
    # In the order of resolution: the methods of `cls`, of the generated class, of the class that it replaces.
    bridge = type(found.base.__name__, (found.generated, found.base), {"__reduce_ex__": _reduce})
    # Transformers records outputs by a class's qualified name, and instances of `cls` may remain.
    names = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.with_slots", "__doc__": cls.__doc__}
    made: type = type(cls)(cls.__name__, (cls, bridge), names)
    set_derived_from(made, cls)
    return made


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle an instance by the class that can be imported."""
    reduced, original = object.__reduce_ex__(self, protocol), derived_from(type(self))
    # FSDP2 derives a class of its own.
    return (_instance, (original,), *reduced[2:]) if type(self) is with_slots(original) else reduced


def _instance(cls: type) -> Any:
    made: Any = with_slots(cls)
    return made.__new__(made)


@cache
def overridden(cls: type) -> str | None:
    """Why a class of `with_slots` may never read its slots; None where each method that reads one is called."""
    original = derived_from(cls)
    if original is None:
        return None
    found = derived(original)
    assert found is not None, original
    names = {"forward", *_readers(found.generated)}
    for base in original.__mro__[: original.__mro__.index(found.base)]:
        for name in sorted(names & vars(base).keys()):
            code = getattr(inspect.unwrap(vars(base)[name]), "__code__", None)
            if code is None or "super" not in code.co_names:
                return f"{base.__name__}.{name} overrides {found.base.__name__}.{name} without calling super()"
    return None


def _readers(generated: type) -> Iterator[str]:
    """Names of the methods that read a slot."""
    for base in generated.__mro__:
        for name, function in vars(base).items():
            code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
            if code is not None and any(used.startswith(PREFIX) for used in code.co_names):
                yield name
