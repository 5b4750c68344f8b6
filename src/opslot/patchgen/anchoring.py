"""Edits of what a pattern matches in a symbol."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from opslot.patchgen.edited_module import EditedModule
from opslot.patchgen.edits import Anchored, Edit
from opslot.patchgen.pattern import PatternMatch, compile_pattern, fill_expression, fill_statements, find_matches
from opslot.patchgen.tree import Node, replace_nodes, splice, walk

Swaps = dict[int, list[cst.CSTNode]]
"""What to put at each match, by the match's `id`."""


def apply_anchored(edit: Anchored, edited: EditedModule) -> None:
    scope = edited.get(edit.target, edit)
    matches: list[PatternMatch] = []
    for text in edit.patterns:
        matches.extend(find_matches(compile_pattern(text), scope.body))
    if len(matches) != edit.count:
        anchors = "\n  or\n".join(edit.patterns)
        raise edited.fail(
            edit, f"{edit.count} match(es) expected, {len(matches)} found, of\n{anchors}", show=edit.target
        )
    swaps: Swaps = {}
    for match in matches:
        swaps[id(match)] = _written(edit, edited, match)
    edited.put(edit.target, rewrite(edit, edited, scope, matches, swaps, edit.mode))
    edited.note(edit.target, edit.summary)
    if edit.slot is not None:
        edited.declare(edit.target.split(".")[0], edit.slot, edit)


def _written(edit: Anchored, edited: EditedModule, match: PatternMatch) -> list[cst.CSTNode]:
    """What the edit puts at a match."""
    if edit.mode == "replace":
        return replace_match(edit, edited, match, edit.template)
    new = fill_statements(edit.template, match.captures)
    edited.sign(edit, new, match.nodes)
    return new


def replace_match(edit: Edit, edited: EditedModule, match: PatternMatch, template: str) -> list[cst.CSTNode]:
    """What replaces a match, by `template`."""
    earlier = edited.author(match.nodes)
    if earlier is not None:
        raise edited.fail(edit, f"its place was already changed by `{earlier.summary}`; drop one of the two")
    upstream = list(match.nodes)
    new: list[cst.CSTNode]
    if match.expression is not None:
        try:
            new = [fill_expression(template, match.captures, match.expression)]
        except cst.ParserSyntaxError:
            raise edited.fail(edit, f"an expression cannot be replaced by statements:\n{template}") from None
    else:
        # What is above the first statement is put above the edit's mark by `splice`.
        upstream[0] = upstream[0].with_changes(leading_lines=[])
        new = fill_statements(template, match.captures, upstream)
    edited.sign(edit, new, upstream)
    return new


def rewrite(
    edit: Edit, edited: EditedModule, scope: Node, matches: Sequence[PatternMatch], swaps: Swaps, mode: str = "replace"
) -> Node:
    """The scope with `swaps[id(match)]` put at each match, and the touched statements bracketed by the edit's mark."""
    _check_overlap(edit, edited, matches)
    mark = edited.mark(edit)
    blocks = {id(match.block): match.block for match in matches}
    for block in blocks.values():
        inside = [match for match in matches if match.block is block]
        new_block = block
        for start in sorted({match.start for match in inside}, reverse=True):
            here = [match for match in inside if match.start == start]
            new_block = _rewrite_statements(new_block, here, swaps, mark, mode)
        scope = replace_nodes(scope, {id(block): new_block})
    return scope


def _check_overlap(edit: Edit, edited: EditedModule, matches: Sequence[PatternMatch]) -> None:
    for match in matches:
        covered = {id(node) for root in match.nodes for node in walk(root)}
        if any(id(node) in covered for other in matches if other is not match for node in other.nodes):
            raise edited.fail(edit, "its matches overlap; give it a longer pattern", show=edit.target)


def _rewrite_statements(
    block: cst.IndentedBlock, here: Sequence[PatternMatch], swaps: Swaps, mark: str, mode: str
) -> cst.IndentedBlock:
    """The block with the matches of one statement, or of one run of statements, rewritten."""
    start, stop = here[0].start, here[0].stop
    new = swaps[id(here[0])]
    if mode == "insert_before":
        return splice(block, start, start, new, mark)
    if mode == "insert_after":
        return splice(block, stop, stop, new, mark)
    if here[0].expression is not None:
        expressions = {id(match.expression): swaps[id(match)][0] for match in here}
        new = [replace_nodes(block.body[start], expressions)]
    return splice(block, start, stop, new, mark)
