"""The edits a patch is made of: plain frozen records, free of any parser, so that reading a patch is cheap.

A symbol is named `Class`, `Class.method` or `function` in the patched module, or `module:symbol` in another
module of the same Transformers release.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Expectations = tuple[tuple[str, tuple[str, ...]], ...]
"""Symbols with the fingerprints that each may have."""


@dataclass(frozen=True)
class OpSlot:
    """A place where a kernel of one op and variant may be bound.

    `name` is the attribute's suffix; it defaults to the op, and tells two variants in one class apart.
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
    """One change of the upstream module at `target`; `note` is the author's own description, if any."""

    target: str
    note: str = ""

    replaces_whole = False

    @property
    def summary(self) -> str:
        return self.note or self.action

    @property
    def action(self) -> str:
        raise NotImplementedError

    @property
    def symbols(self) -> tuple[str, ...]:
        """Upstream symbols whose text this edit touches or relies on."""
        return (self.target,)


@dataclass(frozen=True)
class SlotMethod(Edit):
    """Call the slot's kernel in front of a method's body, or outside its class's decorators."""

    slot: OpSlot = OpSlot("")
    args: str = ""
    outside_decorators: bool = False
    expects: tuple[str, ...] = ()

    @property
    def action(self) -> str:
        where = "outside the decorators of" if self.outside_decorators else "in front of"
        return f"slot {self.slot} {where} {self.target}"


@dataclass(frozen=True)
class SlotCalls(Edit):
    """Route every call of a module's function, made in a method, through a slot of the calling class."""

    slot: OpSlot = OpSlot("")
    expects: Expectations = ()
    count: int | None = None

    @property
    def action(self) -> str:
        return f"slot {self.slot} on the calls of {self.target}"

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.target, *(name for name, _ in self.expects))))


@dataclass(frozen=True)
class Anchored(Edit):
    """Replace, or insert beside, what one of `patterns` matches in the scope `target`."""

    patterns: tuple[str, ...] = ()
    template: str = ""
    mode: Literal["replace", "insert_before", "insert_after"] = "replace"
    count: int = 1
    slot: OpSlot | None = None

    @property
    def action(self) -> str:
        if self.slot is not None:
            return f"slot {self.slot} in {self.target}"
        return f"{self.mode.replace('_', ' ')} `{_one_line(self.patterns[0])}` in {self.target}"


@dataclass(frozen=True)
class InheritMethod(Edit):
    """Bring upstream's own text of an inherited method into the class, so that other edits can reach it."""

    from_module: str = ""
    from_symbol: str = ""

    @property
    def action(self) -> str:
        return f"text of {self.from_module}.{self.from_symbol} as {self.target}"

    @property
    def symbols(self) -> tuple[str, ...]:
        return (self.target.split(".")[0], f"{self.from_module}:{self.from_symbol}")


@dataclass(frozen=True)
class Replacement(Edit):
    """Put the given text in the place of a class, a function or a method; upstream's decorators stay on a method."""

    kind: Literal["class", "function", "method"] = "class"
    text: str = ""
    name_map: tuple[tuple[str, str], ...] = ()

    replaces_whole = True

    @property
    def action(self) -> str:
        return f"replace {self.kind} {self.target}"


@dataclass(frozen=True)
class ExternalReplacement(Edit):
    """Import the class or function `target` from another package instead of defining it."""

    source_module: str = ""
    source_name: str = ""

    replaces_whole = True

    @property
    def action(self) -> str:
        return f"import {self.target} from {self.source_module}.{self.source_name}"


@dataclass(frozen=True)
class ModifyInit(Edit):
    """Add statements around upstream's `__init__` body of the class `target`."""

    text: str = ""
    name_map: tuple[tuple[str, str], ...] = ()

    @property
    def action(self) -> str:
        return f"extend {self.target}.__init__"

    @property
    def symbols(self) -> tuple[str, ...]:
        return (f"{self.target}.__init__",)


@dataclass(frozen=True)
class Exclude(Edit):
    """Leave a class or function out, with its helpers, its isinstance branches and its `__all__` entry."""

    replaces_whole = True

    @property
    def action(self) -> str:
        return f"exclude {self.target}"


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
