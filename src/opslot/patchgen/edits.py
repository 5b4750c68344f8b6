"""The edits of a patch: frozen records that need no parser, so that reading a patch is cheap.

A symbol is named `Class`, `Class.method` or `function` in the patched module, or `module:symbol` in another
module of the same Transformers release.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

NameMap = tuple[tuple[str, str], ...]
"""Prefixes of identifiers with what each becomes."""

Expectations = tuple[tuple[str, tuple[str, ...]], ...]
"""Symbols with the fingerprints that each may have."""


@dataclass(frozen=True)
class Slot:
    """The declaration of a slot: a kernel of this op and variant may be bound there.

    `name` is the attribute's suffix, by default the op's name. Two slots of one class need different names.
    """

    op: str
    variant: str = "standard"
    name: str | None = None

    @property
    def suffix(self) -> str:
        return self.name or self.op

    @property
    def attribute(self) -> str:
        return f"_opslot_{self.suffix}"

    def __str__(self) -> str:
        return f"{self.op}/{self.variant}"


@dataclass(frozen=True)
class Edit:
    """One change of the upstream module at `target`; `note` is the author's own description, if any.

    ACTION describes it with the names of its fields in braces.
    """

    ACTION: ClassVar[str]

    target: str
    note: str = ""

    @property
    def summary(self) -> str:
        return self.note or self.action

    @property
    def action(self) -> str:
        return self.ACTION.format(**vars(self))

    @property
    def symbols(self) -> tuple[str, ...]:
        """Upstream symbols whose text this edit changes or depends on."""
        return (self.target,)

    @property
    def whole(self) -> tuple[str, ...]:
        """Symbols that this edit replaces or removes as a whole."""
        return ()

    def renamed(self, name_map: NameMap) -> Edit:
        """The same edit with each prefix of `name_map` exchanged in every name that it holds."""
        changes = {
            item.name: _renamed(getattr(self, item.name), name_map)
            for item in dataclasses.fields(self)
            if item.name not in ("note", "slot")
        }
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class SlotMethod(Edit):
    """Call the slot's kernel in front of a method's body, or outside its class's decorators."""

    slot: Slot = Slot("")
    args: str = ""
    returns: str = "{call}"
    outside_decorators: bool = False
    parameters: tuple[str, ...] = ()
    expects: tuple[str, ...] = ()

    @property
    def action(self) -> str:
        where = "outside the decorators of" if self.outside_decorators else "in front of"
        return f"slot {self.slot} {where} {self.target}"

    @property
    def symbols(self) -> tuple[str, ...]:
        # A class's decorators belong to the class.
        return (self.target.split(".")[0],) if self.outside_decorators else (self.target,)


@dataclass(frozen=True)
class SlotCalls(Edit):
    """Route every call of a module's function, made in a method, through a slot of the calling class."""

    ACTION = "slot {slot} on the calls of {target}"

    slot: Slot = Slot("")
    expects: Expectations = ()
    count: int | None = None

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.target, *(name for name, _ in self.expects))))


@dataclass(frozen=True)
class SlotLoss(Edit):
    """Compute the loss of the method `target` with the slot's kernel, from hidden states and the head's weight."""

    ACTION = "slot {slot} in {target}"

    slot: Slot = Slot("")


@dataclass(frozen=True)
class Anchored(Edit):
    """Replace, or insert beside, what one of `patterns` matches in the scope `target`."""

    patterns: tuple[str, ...] = ()
    template: str = ""
    mode: Literal["replace", "insert_before", "insert_after"] = "replace"
    count: int = 1
    slot: Slot | None = None

    @property
    def action(self) -> str:
        if self.slot is not None:
            return f"slot {self.slot} in {self.target}"
        return f"{self.mode.replace('_', ' ')} `{_one_line(self.patterns[0])}` in {self.target}"


@dataclass(frozen=True)
class InheritMethod(Edit):
    """Bring upstream's own text of an inherited method into the class, so that other edits can reach it."""

    ACTION = "text of {from_module}.{from_symbol} as {target}"

    from_module: str = ""
    from_symbol: str = ""

    @property
    def symbols(self) -> tuple[str, ...]:
        return (self.target.split(".")[0], f"{self.from_module}:{self.from_symbol}")


@dataclass(frozen=True)
class UndecoratedCopy(Edit):
    """Copy the function `target`, without its decorators, as `name`."""

    ACTION = "{target} without its decorators as {name}"

    name: str = ""


@dataclass(frozen=True)
class Exclude(Edit):
    """Leave classes and functions out, with their helpers, isinstance branches and `__all__` entries.

    `target` is the first of them.
    """

    others: tuple[str, ...] = ()

    @property
    def whole(self) -> tuple[str, ...]:
        return (self.target, *self.others)

    @property
    def symbols(self) -> tuple[str, ...]:
        return self.whole

    @property
    def action(self) -> str:
        return f"exclude {', '.join(self.whole)}"


@dataclass(frozen=True)
class ConfigSlot(Edit):
    """An op that is chosen through the model's config, for the classes `target` and `others`: no text changes."""

    slot: Slot = Slot("")
    others: tuple[str, ...] = ()
    depends: tuple[str, ...] = ()

    @property
    def action(self) -> str:
        return f"{self.slot} of {', '.join((self.target, *self.others))}, chosen through the model's config"

    @property
    def symbols(self) -> tuple[str, ...]:
        return (*(f"{name}.forward" for name in (self.target, *self.others)), *self.depends)


@dataclass(frozen=True)
class ClassAttribute(Edit):
    """Set a class attribute to a literal value; nothing where the class is excluded."""

    ACTION = "set {attribute} of {target}"

    attribute: str = ""
    value: Any = None

    @property
    def symbols(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Decorate(Edit):
    """Put a decorator of another module above a method; nothing where the class is excluded."""

    ACTION = "decorate {target} with {decorator}"

    module: str = ""
    decorator: str = ""

    @property
    def symbols(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class TakeKeywords(Edit):
    """Let a method take any keyword argument, as `kwargs`."""

    ACTION = "let {target} take any keyword argument"


@dataclass(frozen=True)
class ImportSpec:
    """An import statement to add: `from module import names`, or `import module [as alias]`."""

    module: str
    names: tuple[str, ...] = ()
    alias: str | None = None

    @property
    def statement(self) -> str:
        if self.names:
            return f"from {self.module} import {', '.join(self.names)}"
        return f"import {self.module}" + (f" as {self.alias}" if self.alias else "")


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."


def _renamed(value: Any, name_map: NameMap) -> Any:
    """A string, or the strings in nested tuples, with names exchanged; anything else as it is."""
    if isinstance(value, str):
        return rename(value, name_map)
    return tuple(_renamed(item, name_map) for item in value) if isinstance(value, tuple) else value


def rename(text: str, name_map: NameMap) -> str:
    """Exchange prefixes of names in `text`; a name that begins with the new prefix already stays."""
    for old, new in name_map:
        already = f"(?!{re.escape(new[len(old) :])})" if new.startswith(old) and new != old else ""
        text = re.sub(re.escape(old) + already, new, text)
    return text
