"""Slots for instances of classes outside Transformers: a user's, another package's, or shipped with a checkpoint."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from opslot._base.errors import PatchError
from opslot._base.logging import get_logger
from opslot.models._registry import architecture_of
from opslot.patchgen import materialize
from opslot.patchgen.materialization import GENERATED_PACKAGE, NoPatchError
from opslot.patchgen.names import architecture_from
from opslot.patchgen.own_code import may_be_read, unchanged
from opslot.patchgen.source import installed_release
from opslot.patchgen.upstream import UpstreamModule
from opslot.slots.protocol import (
    ATTENTION_OPTIONS,
    BY_DOCUMENT,
    DERIVED_FROM,
    KEEPS_SEQUENCES,
    ON_GLOBAL_SEQUENCES,
    SKIPPED,
    SLOTS,
    TAKES_EARLIER_TOKENS,
    UNKNOWN_LAYERS,
    changed_classes,
    derived_from,
    is_generated_for,
    original_of,
    slot_attribute,
)
from opslot.slots.replaced_methods import reads_documents, replaced_methods

logger = get_logger(__name__)


class Found(NamedTuple):
    """What discovery found in the code of a class.

    Attributes:
        generated: the class with what its edits changed, which derives from it; None where there is nothing.
        problem: why its code was not read, or "".
    """

    generated: type | None
    problem: str = ""


def own_slots(cls: type) -> Found:
    """The class with slots that is generated from the source of a class outside Transformers and torch."""
    upstream, problem = _source_of(cls)
    if upstream is None:
        return Found(None, problem)
    # Methods may be replaced at any time.
    if not unchanged(cls, upstream):
        file = sys.modules[cls.__module__].__file__
        return Found(None, f"methods of {cls.__qualname__} were replaced, or edited in {file} since the import")
    return _slots_in(cls, upstream.digest)


@cache
def _source_of(cls: type) -> tuple[UpstreamModule | None, str]:
    """The module of a class, or why it is not read."""
    name = cls.__module__
    if not may_be_read(name) or derived_from(cls) is not None:
        return None, ""
    if getattr(sys.modules.get(name), cls.__qualname__, None) is not cls:
        return None, f"{cls.__qualname__} is not a class at the top level of the module {name}"
    try:
        upstream = installed_release().module(name)
    except PatchError as error:
        return None, str(error).splitlines()[0]
    if upstream.find(cls.__qualname__) is None:
        return None, f"the file of {name} does not define {cls.__qualname__}"
    return upstream, ""


@cache
def _slots_in(cls: type, digest: str) -> Found:
    name = cls.__module__
    generated = f"{GENERATED_PACKAGE}.{architecture_from(name)}"
    # A module may be imported again, with other classes of the same names.
    if (loaded := sys.modules.get(generated)) is not None and not is_generated_for(loaded, cls, digest):
        del sys.modules[generated]
    problem = _problem_of(name, digest)
    if problem is not None:
        return Found(None, problem)
    try:
        module = importlib.import_module(generated)
    except Exception as error:
        # What a user's code does when its methods are defined again is unknown.
        return Found(None, f"slots were found in {name}, but its generated module cannot be imported: {error}")
    return Found(changed_classes(module).get(cls.__qualname__))


@cache
def _problem_of(name: str, digest: str) -> str | None:
    """Why an imported module whose source has that digest has no generated module; None where it has one, "" where no
    form finds anything."""
    try:
        materialize(architecture_from(name))
    except NoPatchError:
        return ""
    except PatchError as error:
        return f"slots were found in {name}, but its module could not be generated with them: {error}"
    return None


def with_slots(cls: type) -> type | None:
    """A class like `cls` with the slots of its own code and of the classes that it derives from; None without any.

    `super()` in its methods calls those with slots. The same class for each call.
    """
    # Transformers' architectures that build on another's classes have no slots in their own modules.
    return None if cls.__module__.startswith("transformers.") else _with_slots(cls, _all_replaced(cls))


Replaced = tuple[tuple[type, str, Any], ...]


def _all_replaced(cls: type) -> Replaced:
    """The methods that were replaced on the classes of Transformers that `cls` derives from, and other classes that are
    not read, without names."""
    pairs = ((base, _generated_class(base)) for base in cls.__mro__)
    found = ((base, replaced_methods(base, generated)) for base, generated in pairs if generated is not None)
    own = ((base, "", None) for base in cls.__mro__ if own_slots(base).problem)
    return (*((base, name, method) for base, methods in found for name, method in methods.items()), *own)


def _generated_class(cls: type) -> type | None:
    architecture = architecture_of(cls, generated=False)
    return architecture.generated_class(cls.__name__) if architecture is not None else None


@cache
def _with_slots(cls: type, replaced: Replaced) -> type | None:
    generated = _generated_class(cls)
    if generated is not None:
        # In the order of resolution: the methods with slots, then those of the class that they replace.
        methods = {name: method for base, name, method in replaced if base is cls}
        return type(cls.__name__, (generated, cls), methods)
    own = own_slots(cls)
    bases = tuple(base for base in (_with_slots(base, replaced) for base in cls.__bases__) if base is not None)
    names = dict(_names(cls))
    reviewed = any(architecture_of(base, generated=False) is not None for base in cls.__mro__)
    if own.problem and hasattr(cls, "base_model_prefix") and not reviewed:
        names[UNKNOWN_LAYERS] = f"the code of {cls.__name__} was not read: {own.problem}"
    elif own.generated is None and not bases:
        return None
    if (inherited := _wrapped_forward(cls, replaced)) is not None:
        names["forward"] = inherited
    try:
        made: type = type(cls)(cls.__name__, (own.generated or cls, *bases), names)
    except Exception as error:
        # Of a metaclass, or of `__init_subclass__` with arguments.
        logger.warning("no slots in %s, since no class can be derived from it: %s", cls.__name__, error)
        return None
    _derive(made, cls)
    return made


def _derive(made: type, cls: type) -> None:
    """Note what `made` derives from, and which of its slots are read."""
    setattr(made, DERIVED_FROM, cls)
    declared = {name: spec for base in reversed(made.__mro__) for name, spec in vars(base).get(SLOTS, {}).items()}
    if declared:
        kept = {name: spec for name, spec in declared.items() if _hider(made, name) is None}
        setattr(made, SLOTS, kept or declared)


def with_replaced_methods(cls: type, generated: type) -> type:
    """The generated class for instances of a class of Transformers: with the methods that were replaced, if any were.

    It derives from both, so that `super()` works in them.
    """
    found = replaced_methods(cls, generated)
    return _with_methods(cls, generated, tuple(found.items())) if found else generated


@cache
def _with_methods(cls: type, generated: type, methods: tuple[tuple[str, Any], ...]) -> type:
    logger.warning(
        "%s of transformers was changed after its import (%s); its instances keep that, without opslot's kernels there",
        cls.__name__,
        ", ".join(name for name, _ in methods),
    )
    names = {"__module__": generated.__module__, "__doc__": cls.__doc__, "__reduce_ex__": _reduce}
    made = type(cls.__name__, (generated, cls), names | dict(methods))
    _derive(made, cls)
    if (problem := _hider(made, None)) is not None:
        setattr(made, SKIPPED, (("attention", cls.__name__, problem),))
    by_document = getattr(generated, BY_DOCUMENT, False)
    separating = (name for name, _ in methods if by_document or reads_documents(getattr(generated, name, None)))
    if (name := next(separating, None)) is not None:
        setattr(made, KEEPS_SEQUENCES, _replaced(f"{cls.__name__}.{name}"))
        for attribute in (BY_DOCUMENT, ON_GLOBAL_SEQUENCES, TAKES_EARLIER_TOKENS):
            setattr(made, attribute, None)
    return made


def for_replaced_forward(generated: type) -> type:
    """The generated class for an instance whose forward was replaced.

    What replaced it may call the forward of the original class, where `super()` fails in instances of other classes.
    """
    original: Any = original_of(generated)
    if original is None or issubclass(generated, original):
        return generated
    code = getattr(inspect.unwrap(original.forward), "__code__", None)
    return _with_original(generated, original) if code is None or "__class__" in code.co_freevars else generated


@cache
def _with_original(generated: type, original: type) -> type:
    return type(generated.__name__, (generated, original), {"__module__": generated.__module__})


def _replaced(method: str) -> str:
    return f"{method}, or a function that it calls, was replaced"


def _wrapped_forward(cls: type, replaced: Replaced) -> Any:
    """With slots, the forward of a base that a class only wraps, as all subclasses of Transformers' layers do."""
    own = inspect.unwrap(vars(cls)["forward"]) if "forward" in vars(cls) else None
    if own is None:
        return None
    wrapped = (base for base in cls.__bases__ if inspect.unwrap(getattr(base, "forward", cls)) is own)
    found: Any = next(filter(None, (_with_slots(base, replaced) for base in wrapped)), None)
    return None if found is None else found.forward


def _names(cls: type) -> Iterator[tuple[str, Any]]:
    """Attributes of a class like `cls`. Transformers records outputs by a class's qualified name, and saves the file of
    its module."""
    yield "__module__", cls.__module__
    yield "__qualname__", f"{cls.__qualname__}.with_slots"
    yield "__doc__", cls.__doc__
    if cls.__reduce_ex__ is object.__reduce_ex__:
        yield "__reduce_ex__", _reduce


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle an instance by the class that can be imported."""
    reduced, original = object.__reduce_ex__(self, protocol), derived_from(type(self))
    # FSDP2 derives a class of its own.
    return (_instance, (original,), *reduced[2:]) if type(self) is class_made_from(original) else reduced


def _instance(cls: type) -> Any:
    made: Any = class_made_from(cls)
    return made.__new__(made)


def class_made_from(cls: type) -> type | None:
    """The class for instances of a class of Transformers or of another one; None where it has no slots."""
    generated = _generated_class(cls)
    return with_slots(cls) if generated is None else with_replaced_methods(cls, generated)


def binds(cls: type) -> bool:
    """Whether instances of a class of `with_slots` may have kernels."""
    transformers = any(architecture_of(base, generated=False) is not None for base in cls.__mro__)
    return transformers or bool(getattr(cls, SLOTS, None)) or hasattr(cls, ATTENTION_OPTIONS)


@cache
def overridden(cls: type) -> str | None:
    """Why a class of `with_slots` never reads its slots; None where a method that reads one is called."""
    if derived_from(cls) is None:
        return None
    slots = getattr(cls, SLOTS, {})
    hiders = [_hider(cls, name) for name in slots]
    if hiders and None not in hiders:
        return hiders[0]
    return None if slots else _hider(cls, None)


def _hider(cls: type, slot: str | None) -> str | None:
    """What overrides the methods of a generated class that read a slot, without calling them; None if one is called.

    Args:
        slot: its name; None for attention that is chosen by the model's config, which `forward` reads.
    """
    found = None
    for position, base in enumerate(cls.__mro__):
        names = _readers(base, slot) if slot is not None else ["forward"] * (ATTENTION_OPTIONS in vars(base))
        for name in names:
            read = inspect.unwrap(vars(base).get(name, getattr(cls, name)))
            over = _override(cls.__mro__[:position], name, read)
            if over is None:
                return None
            own = f"{base.__name__}.{name}"
            problem = _replaced(own) if over == own else f"{over} overrides {own} without calling super()"
            found = found or problem
    return found


def _override(classes: tuple[type, ...], name: str, method: Any) -> str | None:
    """The name of the first class's own method that is not `method` and does not call that of the next class.

    None if a call reaches `method`, which one of the classes may itself wrap.
    """
    for cls in classes:
        if name not in vars(cls):
            continue
        own = inspect.unwrap(vars(cls)[name])
        if own is method:
            return None
        code = getattr(own, "__code__", None)
        if code is None or "super" not in code.co_names:
            return f"{cls.__name__}.{name}"
    return None


def _readers(cls: type, slot: str) -> list[str]:
    """Names of the methods of a generated class that read a slot."""
    found = []
    for name, function in vars(cls).items() if cls.__module__.startswith(f"{GENERATED_PACKAGE}.") else ():
        code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
        if code is not None and slot_attribute(slot) in code.co_names:
            found.append(name)
    return found
