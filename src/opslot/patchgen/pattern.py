"""Patterns: source text with `$names`, matched by structure against upstream's tree."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import libcst as cst

from opslot._base.errors import PatchError
from opslot.patchgen.tree import children, fields, replace_nodes, walk, walk_statements

_VARIABLE = re.compile(r"\$(\*?)([A-Za-z_]\w*)")
_ONE = "__opslot_one_"
_REST = "__opslot_rest_"

Captured = cst.BaseExpression | Sequence[cst.Arg]


@dataclass(frozen=True)
class Pattern:
    """A compiled pattern: one expression, or consecutive statements."""

    text: str
    expression: cst.BaseExpression | None
    statements: tuple[cst.CSTNode, ...]


@dataclass
class PatternMatch:
    """Where a pattern matched: statements `start:stop` of a block, and the expression inside if it was one."""

    block: cst.IndentedBlock
    start: int
    stop: int
    captures: dict[str, Captured] = field(default_factory=dict)
    expression: cst.BaseExpression | None = None

    @property
    def nodes(self) -> Sequence[cst.CSTNode]:
        return [self.expression] if self.expression is not None else self.block.body[self.start : self.stop]


def compile_pattern(text: str) -> Pattern:
    """Parse a pattern; text that is no Python raises."""
    source = _encode(text)
    try:
        return Pattern(text, cst.parse_expression(source.strip()), ())
    except cst.ParserSyntaxError:
        pass
    try:
        return Pattern(text, None, tuple(cst.parse_module(source + "\n").body))
    except cst.ParserSyntaxError as error:
        raise PatchError(
            f"a pattern is not Python code: {error.message}\n{text}",
            hint="write an expression or statements, with $name for an expression and $*name for arguments",
        ) from None


def find_matches(pattern: Pattern, scope: cst.CSTNode) -> list[PatternMatch]:
    """Every match in the blocks of `scope`, outermost first; an expression is found in the statement around it."""
    matches: list[PatternMatch] = []
    for node in walk_statements(scope):
        if type(node) is cst.IndentedBlock:
            if pattern.expression is not None:
                matches.extend(_expression_matches(pattern.expression, node))
            else:
                matches.extend(_statement_matches(pattern.statements, node))
    return matches


def _statement_matches(pattern: Sequence[cst.CSTNode], block: cst.IndentedBlock) -> list[PatternMatch]:
    found = []
    for start in range(len(block.body) - len(pattern) + 1):
        captures: dict[str, Captured] = {}
        window = block.body[start : start + len(pattern)]
        if all(_matches(want, have, captures) for want, have in zip(pattern, window)):
            found.append(PatternMatch(block, start, start + len(pattern), captures))
    return found


def _expression_matches(pattern: cst.BaseExpression, block: cst.IndentedBlock) -> list[PatternMatch]:
    found = []
    anything = isinstance(pattern, cst.Name) and pattern.value.startswith(_ONE)
    for index, statement in enumerate(block.body):
        for node in _outside_blocks(statement):
            captures: dict[str, Captured] = {}
            # LibCST's classes are abstract, so isinstance is slow.
            if (anything or type(node) is type(pattern)) and _matches(pattern, node, captures):
                assert isinstance(node, cst.BaseExpression), "as the pattern is"
                found.append(PatternMatch(block, index, index + 1, captures, node))
    return found


def _outside_blocks(node: cst.CSTNode) -> list[cst.CSTNode]:
    """Nodes of a statement that do not belong to the statements inside it."""
    nodes: list[cst.CSTNode] = []
    remaining = [node]
    while remaining:
        current = remaining.pop()
        if type(current) is not cst.IndentedBlock:
            nodes.append(current)
            remaining.extend(reversed(children(current)))
    return nodes


def _matches(want: object, have: object, captures: dict[str, Captured]) -> bool:
    if isinstance(want, cst.Name) and want.value.startswith(_ONE):
        if not isinstance(have, cst.BaseExpression):
            return False
        name = want.value.removeprefix(_ONE)
        bound = captures.setdefault(name, have)
        return bound is have or (isinstance(bound, cst.CSTNode) and _matches(bound, have, {}))
    if isinstance(want, list | tuple):
        return isinstance(have, list | tuple) and _sequences_match(want, have, captures)
    if not isinstance(want, cst.CSTNode):
        return want == have
    if type(want) is not type(have):
        return False
    if isinstance(want, cst.SimpleString) and isinstance(have, cst.SimpleString):
        return want.evaluated_value == have.evaluated_value
    assert isinstance(have, cst.CSTNode)
    return all(_matches(value, getattr(have, name), captures) for name, value in fields(want))


def _sequences_match(want: Sequence[object], have: Sequence[object], captures: dict[str, Captured]) -> bool:
    rest = _rest_name(want[-1]) if want else None
    if rest is None:
        return len(want) == len(have) and all(_matches(w, h, captures) for w, h in zip(want, have))
    fixed = len(want) - 1
    if len(have) < fixed or not all(_matches(w, h, captures) for w, h in zip(want[:-1], have)):
        return False
    captures[rest] = [arg for arg in have[fixed:] if isinstance(arg, cst.Arg)]
    return True


def _rest_name(node: object) -> str | None:
    if isinstance(node, cst.Arg) and node.star == "*" and isinstance(node.value, cst.Name):
        name = node.value.value
        return name.removeprefix(_REST) if name.startswith(_REST) else None
    return None


def fill_expression(
    template: str, captures: Mapping[str, Captured], match: cst.BaseExpression | None = None
) -> cst.BaseExpression:
    """The template's expression with its `$names` filled in, `$match` by the very node that matched."""
    parsed = cst.parse_expression(_encode(template))
    return replace_nodes(parsed, _fillings(template, parsed, captures, match))


def fill_statements(
    template: str, captures: Mapping[str, Captured], match: Sequence[cst.CSTNode] = ()
) -> list[cst.CSTNode]:
    """The template's statements with its `$names` filled in, a line `$match` by the very statements that matched."""
    parsed = cst.parse_module(_encode(template) + "\n")
    return list(replace_nodes(parsed, _fillings(template, parsed, captures, match)).body)


def _fillings(
    template: str,
    parsed: cst.CSTNode,
    captures: Mapping[str, Captured],
    match: cst.BaseExpression | Sequence[cst.CSTNode] | None,
) -> dict[int, cst.CSTNode | Sequence[cst.CSTNode]]:
    fillings: dict[int, cst.CSTNode | Sequence[cst.CSTNode]] = {}
    filled_lines: set[int] = set()
    for node in walk(parsed):
        rest = _rest_name(node)
        if rest is not None:
            captured = _captured(template, rest, captures)
            assert isinstance(captured, Sequence), f"${rest} was bound by a single expression"
            fillings[id(node)] = [arg.deep_clone() for arg in captured]
        elif isinstance(match, Sequence) and match and (line_name := _name_alone(node)) is not None:
            if line_name.value == f"{_ONE}match":
                fillings[id(node)] = list(match)
                filled_lines.add(id(line_name))
        elif isinstance(node, cst.Name) and node.value.startswith(_ONE) and id(node) not in filled_lines:
            name = node.value.removeprefix(_ONE)
            if name == "match" and isinstance(match, cst.BaseExpression):
                fillings[id(node)] = match
            else:
                single = _captured(template, name, captures)
                assert isinstance(single, cst.CSTNode), f"${name} was bound by a sequence of arguments"
                fillings[id(node)] = single.deep_clone()
    return fillings


def _name_alone(line: cst.CSTNode) -> cst.Name | None:
    """The name that is all there is on a line."""
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
        return None
    small = line.body[0]
    return small.value if isinstance(small, cst.Expr) and isinstance(small.value, cst.Name) else None


def _captured(template: str, name: str, captures: Mapping[str, Captured]) -> Captured:
    if name not in captures:
        known = ", ".join(f"${known}" for known in captures) or "none"
        raise PatchError(
            f"the template uses ${name}, which its pattern does not bind\n{template}",
            found=f"bound: {known}",
            hint="bind it in the pattern, or use another name",
        )
    return captures[name]


def _encode(text: str) -> str:
    return _VARIABLE.sub(lambda found: f"*{_REST}{found[2]}" if found[1] else f"{_ONE}{found[2]}", text)
