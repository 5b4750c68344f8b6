"""Writes what a fused loss computes in place of the block that computes the loss from the logits."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable

_CASTS = ("float", "contiguous")
_CROSS_ENTROPIES = ("nn.functional.cross_entropy", "F.cross_entropy", "torch.nn.functional.cross_entropy")
LOSS_CALL = "self.loss_function"
# What Transformers' loss functions read of the arguments of a forward; they ignore others, even if a kernel has an
# option of that name (label_smoothing).
_READ_OF_FORWARD = ("num_items_in_batch", "ignore_index", "shift_labels")


class UnknownLossError(Exception):
    """Why the loss of a forward has no fused form; starts with a verb."""


class FusedLoss(ast.NodeTransformer):
    """Rewrites the block of the loss, with rows of the hidden states in place of rows of the logits."""

    def __init__(
        self,
        logits: str,
        head: str,
        head_input: ast.expr,
        bias: str,
        shape: str,
        criteria: dict[str, ast.Call],
        labels_in_place: bool,
    ) -> None:
        self.head, self.shape = head, shape
        # PEFT's wrapper of a head with trained tokens has no bias.
        self.bias = f"{bias}.view(-1).to({head}.weight.dtype)" if bias else f"getattr({head}, 'bias', None)"
        self.criteria, self.labels_in_place = criteria, labels_in_place
        # Variables that hold rows of the logits, what holds those rows of the hidden states, and whether the rows are
        # still [batch, sequence].
        self.rows: dict[str, tuple[ast.expr, bool]] = {logits: (head_input, True)}

    def write(self, block: ast.If) -> tuple[list[ast.stmt], list[str]]:
        """(the fused statements, conditions under which they do not hold)."""
        statements: list[ast.stmt] = []
        guards = []
        (logits,) = self.rows
        head_input, _ = self.rows[logits]
        uses = sum(isinstance(node, ast.Name) and node.id == logits for node in ast.walk(block))
        if uses > 1 and not isinstance(head_input, ast.Name):
            statements += ast.parse(f"head_input = {ast.unparse(head_input)}").body
            self.rows[logits] = ast.Name("head_input"), True
        for statement in block.body:
            if self._is_criterion(statement):
                continue
            rows = dict(self.rows)
            try:
                statements.append(self.visit(copy.deepcopy(statement)))
            except UnknownLossError:
                self.rows = rows
                guard = self._guard(statement, block)
                if guard is None:
                    raise
                guards.append(guard)
        return statements, guards

    def _guard(self, statement: ast.stmt, block: ast.If) -> str | None:
        """The condition of a statement beside the loss that needs the logits; None for another statement."""
        is_part = any(is_loss(node, self.criteria) for node in ast.walk(statement))
        if isinstance(statement, ast.If) and not statement.orelse and not is_part:
            inside = {
                node.id for node in ast.walk(block) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
            if not uses_names(statement.test, *self.rows, *inside):
                return ast.unparse(statement.test)
        return None

    def _is_criterion(self, statement: ast.stmt) -> bool:
        return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) in self.criteria

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        found = self._rows_of(node.value)
        if found is None:
            return self.generic_visit(node)
        rows, whole = found
        target = node.targets[0]
        if not isinstance(target, ast.Name):
            raise UnknownLossError(f"uses the logits beside the loss: `{short_source(node)}`")
        name = target.id.replace("logits", "head_input")
        self.rows[target.id] = ast.Name(name), whole
        return ast.Assign([ast.Name(name)], rows, lineno=0)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if is_loss(node, self.criteria):
            return self._kernel_call(node)
        size = self._size(node)
        return self.generic_visit(node) if size is None else size

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        size = self._size(node)
        return self.generic_visit(node) if size is None else size

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        found = self._rows_of(node.value) if node.attr == "device" else None
        return self.generic_visit(node) if found is None else ast.Attribute(found[0], "device")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.rows:
            raise UnknownLossError(f"uses `{node.id}` for more than its loss")
        return node

    def _size(self, node: ast.Call | ast.Subscript) -> ast.expr | None:
        """`logits.shape[1]` and `logits.size(1)` of the hidden states; the last size is another one."""
        if isinstance(node, ast.Subscript):
            of, index = node.value, node.slice
            wanted = isinstance(of, ast.Attribute) and of.attr == "shape"
        else:
            of, index = node.func, node.args[0] if len(node.args) == 1 else ast.Constant(None)
            wanted = isinstance(of, ast.Attribute) and of.attr == "size"
        if not wanted or not isinstance(of, ast.Attribute):
            return None
        found = self._rows_of(of.value)
        if found is None:
            return None
        rows, whole = found
        if not whole or ast.unparse(index) not in ("0", "1", "-2"):
            raise UnknownLossError(f"uses the logits beside the loss: `{short_source(node)}`")
        return ast.parse(f"({ast.unparse(rows)}).shape[{ast.unparse(index)}]", mode="eval").body

    def _rows_of(self, value: ast.expr) -> tuple[ast.expr, bool] | None:
        """The rows of the hidden states for an expression of rows of the logits; None for another expression."""
        if isinstance(value, ast.Name):
            return self.rows.get(value.id)
        if (inner := without_casts(value)) is not None:
            return self._rows_of(inner)
        if isinstance(value, ast.Subscript):
            found = self._rows_of(value.value)
            if found is None:
                return None
            return self._selected(found, value.slice)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            found = self._rows_of(value.func.value)
            if found is None:
                return None
            if value.func.attr in ("view", "reshape") and len(value.args) == 2 and ast.unparse(value.args[0]) == "-1":
                # The kernel takes rows of any shape.
                return found[0], False
            if value.func.attr == "to" and len(value.args) == 1 and ast.unparse(value.args[0]).endswith(".device"):
                moved = ast.Call(ast.Attribute(found[0], "to"), [self.visit(copy.deepcopy(value.args[0]))], [])
                return moved, found[1]
        return None

    def _selected(self, found: tuple[ast.expr, bool], index: ast.expr) -> tuple[ast.expr, bool]:
        """Rows that an index selects."""
        rows, whole = found
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        texts = [ast.unparse(part) for part in parts]
        if texts[0] == "...":
            keeps_columns = len(parts) == 1 or texts[-1] == ":"
        elif len(parts) == 1:
            keeps_columns, whole = True, whole and isinstance(index, ast.Slice)
        else:
            keeps_columns = whole and (len(parts) == 2 or (len(parts) == 3 and texts[-1] == ":"))
        if not keeps_columns or any(text == "None" for text in texts):
            raise UnknownLossError(f"selects logits in its loss: `[{', '.join(texts)}]`")
        new = self.visit(copy.deepcopy(index))
        return ast.Subscript(rows, new), whole

    def _kernel_call(self, node: ast.Call) -> ast.expr:
        function = ast.unparse(node.func)
        names = ("logits", "labels", "vocab_size") if function == LOSS_CALL else ("input", "target")
        given = dict(zip(names, node.args)) | {k.arg: k.value for k in node.keywords if k.arg in names}
        rest = [k for k in node.keywords if k.arg not in names]
        if len(node.args) > len(names) or names[0] not in given:
            raise UnknownLossError(f"calls its loss as `{short_source(node)}`")
        found = self._rows_of(given[names[0]])
        if found is None:
            raise UnknownLossError(f"computes the loss of `{short_source(given[names[0]])}`")
        labels, shifted = self.visit(copy.deepcopy(given.get(names[1], ast.Constant(None)))), None
        if function != LOSS_CALL:
            rest = _criterion_options(self.criteria.get(function, node))
        if function != LOSS_CALL or self.labels_in_place:
            labels, shifted = ast.Constant(None), labels
        arguments = f"{ast.unparse(found[0])}, {self.head}.weight, {ast.unparse(labels)}, bias={self.bias}"
        arguments += f", head={self.head}"
        arguments += f", shift_labels={ast.unparse(shifted)}" if shifted is not None else ""
        arguments += self.shape
        for keyword in rest:
            value = self.visit(copy.deepcopy(keyword.value))
            if keyword.arg is not None:
                arguments += f", {keyword.arg}={ast.unparse(value)}"
            elif isinstance(value, ast.Name):
                read: tuple[str, ...] = _READ_OF_FORWARD[: 2 if shifted is not None else 3]
                arguments += f", **{selected(value.id, read)}"
            else:
                arguments += f", **{ast.unparse(value)}"
        return ast.parse(f"loss_kernel({arguments})", mode="eval").body


def _criterion_options(call: ast.Call) -> list[ast.keyword]:
    """The options of a cross entropy that are not torch's defaults."""
    options = [k for k in call.keywords if (k.arg, ast.unparse(k.value)) != ("reduction", "'mean'")]
    if any(k.arg not in ("ignore_index", "label_smoothing", "input", "target") for k in options):
        raise UnknownLossError(f"calls its loss as `{short_source(call)}`")
    return [k for k in options if k.arg in ("ignore_index", "label_smoothing")]


def selected(mapping: str, names: tuple[str, ...]) -> str:
    """A dict of those of `names` that a mapping has."""
    return f"{{name: {mapping}[name] for name in {names!r} if name in {mapping}}}"


def is_loss(node: ast.AST, criteria: Iterable[str]) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in (LOSS_CALL, *_CROSS_ENTROPIES, *criteria)


def uses_names(node: ast.AST, *names: str) -> bool:
    return any(isinstance(found, ast.Name) and found.id in names for found in ast.walk(node))


def method_of(value: ast.AST, *names: str) -> ast.expr | None:
    """`x` of `x.name()`."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in names:
        return value.func.value if not (value.args or value.keywords) else None
    return None


def without_casts(value: ast.AST) -> ast.expr | None:
    """`x` of `x.float()`, `x.contiguous()` and `x.to(torch.float32)`."""
    if (inner := method_of(value, *_CASTS)) is not None:
        return inner
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "to":
        given = [*map(ast.unparse, value.args), *(ast.unparse(k.value) for k in value.keywords)]
        return value.func.value if given == ["torch.float32"] else None
    return None


def short_source(node: ast.AST) -> str:
    line = " ".join(ast.unparse(node).split())
    return line if len(line) <= 80 else f"{line[:77]}..."
