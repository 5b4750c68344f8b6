"""What concerns the module as a whole: imports, helpers and the header."""

from __future__ import annotations

import symtable
from collections.abc import Sequence
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node

from opslot._base.errors import PatchError
from opslot.patchgen.edited_module import EditedModule
from opslot.patchgen.inheritance import absolute_name
from opslot.patchgen.overlay import keep_changes, make_of_original
from opslot.patchgen.tree import comment, is_docstring, names_below, replace_nodes, walk_statements


def finish_module(edited: EditedModule) -> None:
    """Make imports absolute, add and drop imports, add helpers, and write the header."""
    elsewhere = edited.upstream.own is not None
    if elsewhere:
        keep_changes(edited)
    _make_imports_absolute(edited)
    _drop_import_names(edited)
    _add_after_imports(edited)
    _add_at_the_end(edited)
    if elsewhere:
        make_of_original(edited)
    _check_dropped_names(edited)
    _write_header(edited)


def _make_imports_absolute(edited: EditedModule) -> None:
    body: list[Any] = []
    for statement in edited.module.body:
        relative = [n for n in walk_statements(statement) if type(n) is cst.ImportFrom and n.relative]
        body.append(replace_nodes(statement, {id(node): _absolute(node, edited.upstream.package) for node in relative}))
    edited.module = edited.module.with_changes(body=body)


def _absolute(node: cst.ImportFrom, package: str) -> cst.ImportFrom:
    name = get_full_name_for_node(node.module) if node.module else None
    absolute = absolute_name(package, len(node.relative), name)
    return node.with_changes(relative=[], module=_dotted(absolute))


def _dotted(name: str) -> cst.Name | cst.Attribute:
    first, *rest = name.split(".")
    node: cst.Name | cst.Attribute = cst.Name(first)
    for part in rest:
        node = cst.Attribute(node, cst.Name(part))
    return node


def _drop_import_names(edited: EditedModule) -> None:
    wanted = set(edited.patch.dropped_imports)
    if not wanted:
        return
    swaps: dict[int, cst.CSTNode | Sequence[cst.CSTNode]] = {}
    dropped: set[str] = set()
    for node in walk_statements(edited.module):
        if not isinstance(node, cst.SimpleStatementLine):
            continue
        for small in node.body:
            if isinstance(small, cst.Import | cst.ImportFrom) and not isinstance(small.names, cst.ImportStar):
                bound = {id(alias): _bound_name(alias) for alias in small.names}
                gone = {name for name in bound.values() if name in wanted}
                kept = [alias for alias in small.names if bound[id(alias)] not in wanted]
                dropped |= gone
                if gone and kept:
                    kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
                    swaps[id(small)] = small.with_changes(names=kept)
                elif gone:
                    swaps[id(node)] = []
    if missing := wanted - dropped:
        raise PatchError(
            f"drop_import_names: {edited.patch.source_module} of transformers {edited.release.version}"
            f" imports no {', '.join(sorted(missing))}",
            hint="drop only names that it imports",
        )
    edited.module = replace_nodes(edited.module, swaps)


def _check_dropped_names(edited: EditedModule) -> None:
    """Raise PatchError for a dropped name that the module still reads and does not bind in another way."""
    if not edited.patch.dropped_imports:
        return
    module = symtable.symtable(edited.module.code, edited.patch.target_file, "exec")
    bound = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    readers: dict[str, list[str]] = {}
    for table in [module, *module.get_children()]:
        for name in _globals_read(table, nested=table is not module).intersection(edited.patch.dropped_imports):
            readers.setdefault(name, []).append("the module" if table is module else table.get_name())
    if left := {name: names for name, names in readers.items() if name not in bound}:
        raise PatchError(
            f"drop_import_names: {edited.patch.source_module} of transformers {edited.release.version}"
            f" still uses {', '.join(sorted(left))}",
            found="; ".join(f"{name} in {', '.join(sorted(set(names)))}" for name, names in sorted(left.items())),
            hint="replace or exclude these too, or define the name with add_import or add_post_import_block",
        )


def _globals_read(table: symtable.SymbolTable, nested: bool = True) -> set[str]:
    """Names of the module that a scope reads, with those inside it."""
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()}
    inside = (_globals_read(child) for child in table.get_children()) if nested else ()
    return names.union(*inside)


def _bound_name(alias: cst.ImportAlias) -> str:
    if alias.asname is not None:
        return str(get_full_name_for_node(alias.asname.name))
    return str(get_full_name_for_node(alias.name)).split(".")[0]


def _add_after_imports(edited: EditedModule) -> None:
    patch = edited.patch
    used = set().union(*map(names_below, edited.module.body)) if edited.imports else set()
    inherited = [statement for name, statement in edited.imports.items() if name in used]
    statements = [spec.statement for spec in patch.additional_imports] + _merged(inherited)
    blocks = [text.strip("\n") for text in (*patch.post_import_blocks, *patch.helpers)]
    if not statements and not blocks:
        return
    body = list(edited.module.body)
    at = _end_of_imports(body)
    new: list[cst.SimpleStatementLine | cst.BaseCompoundStatement] = []
    if statements:
        lines = list(cst.parse_module("\n".join(statements) + "\n").body)
        new += [lines[0].with_changes(leading_lines=[comment("[PATCHED: imports of the patches]")]), *lines[1:]]
    for text in blocks:
        new += _added_block(text)
    body[at:at] = new
    edited.module = edited.module.with_changes(body=body)


def _add_at_the_end(edited: EditedModule) -> None:
    added = [line for text in edited.patch.final_blocks for line in _added_block(text)]
    edited.module = edited.module.with_changes(body=[*edited.module.body, *added])


def _added_block(text: str) -> list[cst.SimpleStatementLine | cst.BaseCompoundStatement]:
    """The statements of `text`, set off from what is above and marked as the patch's."""
    module = cst.parse_module(text + "\n")
    first, *others = module.body
    above = [cst.EmptyLine(indent=False), cst.EmptyLine(indent=False), comment("[PATCHED: added]"), *module.header]
    return [first.with_changes(leading_lines=[*above, *first.leading_lines]), *others]


def _merged(statements: Sequence[str]) -> list[str]:
    """Import statements with the names from one module in one of them, sorted."""
    plain = {statement for statement in statements if not statement.startswith("from ")}
    names: dict[str, set[str]] = {}
    for statement in set(statements) - plain:
        module, _, imported = statement.removeprefix("from ").partition(" import ")
        names.setdefault(module, set()).add(imported)
    merged = [f"from {module} import {', '.join(sorted(names[module]))}" for module in sorted(names)]
    return sorted(plain) + merged


def _end_of_imports(body: Sequence[cst.CSTNode]) -> int:
    """Position after the last plain import above the first definition."""
    end = 0
    for index, node in enumerate(body):
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            break
        if isinstance(node, cst.SimpleStatementLine) and isinstance(node.body[0], cst.Import | cst.ImportFrom):
            end = index + 1
        elif index == 0 and is_docstring(node):
            end = 1
    return end


def _write_header(edited: EditedModule) -> None:
    patch = edited.patch
    transformers = f"transformers {edited.release.version}"
    elsewhere = edited.upstream.own is not None
    origin = patch.source_module if elsewhere else f"{patch.source_module} of {transformers}"
    made = "Upstream's licence, above, holds. Changes made to upstream's text:"
    if elsewhere:
        made = "Changes made to methods of its classes:"
    lines = [
        f"Generated from {origin} by opslot patchgen; do not edit.",
        made,
        *(f"  Patch.{number}: {edit.summary}" for number, edit in enumerate(patch.edits, 1)),
        *(f"  import: {spec.statement}" for spec in patch.additional_imports),
        *(f"  import dropped: {name}" for name in patch.dropped_imports),
        *(f"  added: {text.splitlines()[0]}" for text in (*patch.post_import_blocks, *patch.helpers)),
        *(f"  added at the end: {text.splitlines()[0]}" for text in patch.final_blocks),
    ]
    header = [*edited.module.header, *(comment(line) for line in lines)]
    body = list(edited.module.body)
    if not body or not is_docstring(body[0]):
        summary = patch.description or "Upstream's modeling code with slots for kernels"
        origin = patch.source_module if elsewhere else transformers
        docstring = f'"""{summary}; generated from {origin}, do not edit."""'
        if body:
            body[0] = body[0].with_changes(leading_lines=[cst.EmptyLine(indent=False), *body[0].leading_lines])
        body[:0] = [cst.SimpleStatementLine([cst.Expr(cst.SimpleString(docstring))])]
    edited.module = edited.module.with_changes(header=header, body=body)
