"""The upstream module while it is being edited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from opslot._base.errors import PatchError
from opslot.patchgen.config import PatchConfig
from opslot.patchgen.edits import ClassAttribute, Edit, Slot
from opslot.patchgen.source import Release
from opslot.patchgen.tree import block_of, comment, is_docstring, is_placeholder, splice, walk, with_lines_above
from opslot.patchgen.upstream import UpstreamModule


@dataclass
class ClassSlots:
    """What edits declared on one class, in order: slots, and other attributes with their values."""

    slots: dict[str, Slot] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)


class EditedModule:
    """A LibCST module with its definitions addressed by symbol, and a record of which edit wrote what."""

    def __init__(self, patch: PatchConfig, release: Release) -> None:
        self.patch = patch
        self.release = release
        self.upstream: UpstreamModule = release.module(patch.source_module)
        self.module = cst.parse_module(self.upstream.text)
        self.class_slots: dict[str, ClassSlots] = {}
        self.imports: dict[str, str] = {}
        self._author: dict[int, Edit] = {}
        self._kept_alive: list[cst.CSTNode] = []

    def fail(self, edit: Edit, problem: str, *, show: str | None = None) -> PatchError:
        """An error that names the edit, the module and the release, and shows the symbol's present text."""
        message = f"{edit.summary}\n  in {self.patch.source_module} of transformers {self.release.version}: {problem}"
        symbol = self.upstream.symbol(show) if show else None
        if symbol is not None:
            message += f"\n  upstream's {show}, from line {symbol.first_line}:\n\n{symbol.text.rstrip()}\n"
        return PatchError(message)

    def get(self, symbol: str, edit: Edit) -> cst.FunctionDef | cst.ClassDef:
        """The definition called `Class`, `Class.method` or `function`."""
        found = self.find(symbol)
        if found is None:
            raise self._missing(symbol, edit)
        return block_of(found)

    def find(self, symbol: str) -> cst.FunctionDef | cst.ClassDef | None:
        index = self.index(symbol.split(".")[0])
        if index is None:
            return None
        found: cst.CSTNode = self.module.body[index]
        if "." in symbol:
            methods = found.body.body if isinstance(found, cst.ClassDef) else ()
            position = _position(methods, symbol.split(".")[1])
            if position is None:
                return None
            found = methods[position]
        assert isinstance(found, cst.FunctionDef | cst.ClassDef)
        return found

    def _missing(self, symbol: str, edit: Edit) -> PatchError:
        owner = symbol.split(".")[0]
        return self.fail(edit, self.upstream.missing(symbol), show=owner if owner != symbol else None)

    def index(self, name: str) -> int | None:
        """Position of a top-level definition in the module."""
        return _position(self.module.body, name)

    def put(self, symbol: str, new: cst.CSTNode) -> None:
        """Put `new` in the place of a definition; a method that the class lacks goes to its end."""
        owner, _, method = symbol.partition(".")
        index = self.index(owner)
        assert index is not None
        if method:
            holder = block_of(self.module.body[index])
            assert isinstance(holder, cst.ClassDef)
            methods: list[Any] = list(holder.body.body)
            position = _position(methods, method)
            if position is None:
                methods = [statement for statement in methods if not is_placeholder(statement)]
                methods.append(new)
            else:
                methods[position] = new
            new = holder.with_changes(body=holder.body.with_changes(body=methods))
        body: list[Any] = list(self.module.body)
        body[index] = new
        self.module = self.module.with_changes(body=body)

    def note(self, symbol: str, text: str) -> None:
        """Write `# [PATCHED: text]` above a definition."""
        node = self.find(symbol)
        assert node is not None
        self.put(symbol, with_lines_above(node, [comment(f"[PATCHED: {text}]")]))

    def declare(self, class_name: str, slot: Slot, edit: Edit) -> None:
        """Give a class a slot."""
        declared = self.class_slots.setdefault(class_name, ClassSlots())
        if declared.slots.setdefault(slot.suffix, slot) != slot:
            raise self.fail(
                edit,
                f"{class_name} already has the slot {declared.slots[slot.suffix]} at {slot.attribute};"
                f" give {slot} its own name: Slot({slot.op!r}, {slot.variant!r}, name=...)",
            )
        number = self.number(edit)
        if number not in declared.numbers:
            declared.numbers.append(number)

    def set_attribute(self, edit: ClassAttribute) -> None:
        """Give a class an attribute with a literal value."""
        self.get(edit.target, edit)
        declared = self.class_slots.setdefault(edit.target, ClassSlots())
        declared.attributes[edit.attribute] = edit.value
        declared.numbers.append(self.number(edit))

    def number(self, edit: Edit) -> int:
        return next(index for index, other in enumerate(self.patch.edits, 1) if other is edit)

    def mark(self, edit: Edit) -> str:
        return f"--- Patch.{self.number(edit)} ---"

    def sign(self, edit: Edit, nodes: Sequence[cst.CSTNode], upstream: Sequence[cst.CSTNode] = ()) -> None:
        """Record that `edit` wrote `nodes`, all but those below `upstream`."""
        kept = {id(node) for root in upstream for node in walk(root)}
        for root in nodes:
            self._kept_alive.append(root)
            self._author.update((id(node), edit) for node in walk(root) if id(node) not in kept)

    def author(self, nodes: Sequence[cst.CSTNode]) -> Edit | None:
        """An edit that wrote any of `nodes` or what is in them."""
        for root in nodes:
            for node in walk(root):
                if id(node) in self._author:
                    return self._author[id(node)]
        return None

    def write_slot_declarations(self) -> None:
        """Write each class's `_opslot_slots`, the slots' defaults and other attributes at the top of its body."""
        for name, declared in self.class_slots.items():
            index = self.index(name)
            if index is None:
                continue
            holder = block_of(self.module.body[index])
            assert isinstance(holder, cst.ClassDef)
            assert isinstance(holder.body, cst.IndentedBlock)
            pairs = (f'"{suffix}": ("{slot.op}", "{slot.variant}")' for suffix, slot in declared.slots.items())
            lines = [f"_opslot_slots = {{{', '.join(pairs)}}}"] if declared.slots else []
            lines += [f"{slot.attribute} = None" for slot in declared.slots.values()]
            lines += [f"{attribute} = {value!r}" for attribute, value in declared.attributes.items()]
            mark = f"--- {', '.join(f'Patch.{number}' for number in sorted(declared.numbers))} ---"
            self.put(name, holder.with_changes(body=_with_declarations(holder.body, lines, mark)))


def _with_declarations(block: cst.IndentedBlock, lines: Sequence[str], mark: str) -> cst.IndentedBlock:
    """The class body with `lines` under its docstring, set off by blank lines."""
    blank = cst.EmptyLine(indent=False)
    body: list[Any] = list(block.body)
    start = 1 if is_docstring(body[0]) else 0
    rest = body[start:]
    if len(rest) == 1 and is_placeholder(rest[0]):
        rest = []
    if rest and not (rest[0].leading_lines and rest[0].leading_lines[0].comment is None):
        rest[0] = rest[0].with_changes(leading_lines=[blank, *rest[0].leading_lines])
    first, *others = cst.parse_module("\n".join(lines) + "\n").body
    if start:
        first = first.with_changes(leading_lines=[blank])
    block = block.with_changes(body=[*body[:start], *rest])
    return splice(block, start, start, [first, *others], mark)


def _position(body: Sequence[cst.CSTNode], name: str) -> int | None:
    """Position of the last definition of that name."""
    for index in reversed(range(len(body))):
        node = body[index]
        if isinstance(node, cst.FunctionDef | cst.ClassDef) and node.name.value == name:
            return index
    return None
