"""Forms: declarations of upstream code that an op can replace, by fingerprint or pattern, and of where its slot goes.

The forms of an op are in its `forms.py`; `opslot.models.discovery` applies all of them to a module. This file names
no op.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from opslot.patchgen.config import PatchConfig
from opslot.patchgen.edits import Slot
from opslot.patchgen.fingerprint import fingerprint
from opslot.patchgen.upstream import UpstreamModule, find_nodes


@dataclass(frozen=True)
class Match:
    """Upstream code that an op replaces.

    Attributes:
        symbol: upstream's class or function.
        op, variant: what it computes.
        write: adds the slot to a patch.
    """

    symbol: str
    op: str
    variant: str
    write: Callable[[PatchConfig], None] = field(compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.op}/{self.variant}"


@dataclass(frozen=True)
class Skip:
    """Upstream code that looks like an op's and keeps Transformers' implementation.

    Attributes:
        symbol: upstream's class or function.
        op: the op's name.
        reason: why no form of the op matches, starting with a verb.
        write: adds to a patch what the class needs nevertheless.
    """

    symbol: str
    op: str
    reason: str
    write: Callable[[PatchConfig], None] = field(default=lambda patch: None, compare=False, repr=False)


@dataclass(frozen=True)
class ClassFact:
    """Something about a class that its generated class states as an attribute.

    Attributes:
        final_block: source text that the generated module needs for it at its end, once for all classes.
    """

    name: str
    attribute: str
    value: object
    final_block: str = ""


# Parameters that are the states which cross attention attends to.
OTHER_STATES = frozenset({"key_value_states", "encoder_hidden_states", "cross_attention_states"})

# Attributes of MLPs that hold the activation.
ACTIVATION_ATTRIBUTES = ("act_fn", "activation_fn", "act", "activation")

Finding = Match | Skip | ClassFact


class ModuleView:
    """One upstream module, as forms read it."""

    def __init__(self, upstream: UpstreamModule) -> None:
        self.upstream = upstream
        self.tree = upstream.tree
        self.classes = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}
        self._fingerprints: dict[str, str | None] = {}

    @cached_property
    def models(self) -> list[str]:
        """The classes that all models of the module derive from; outside Transformers under any name."""
        found = [name for name in self.classes if name.endswith("PreTrainedModel")]
        if self.upstream.own is None:
            return found
        own = [name for name in self.classes if self.upstream.is_own(name) and self.is_model(name)]
        return [name for name in own if not {*own} & {*self.bases(name)}]

    def is_model(self, name: str) -> bool:
        """Whether a class is Transformers' PreTrainedModel, by its name, or derives from it."""
        # A class may have the name of its base in another module, as in `class LayerNorm(nn.LayerNorm)`.
        waiting, seen = [name], set[str]()
        while waiting:
            name = waiting.pop()
            if name.endswith("PreTrainedModel"):
                return True
            if name in self.classes and name not in seen:
                waiting += [ast.unparse(base).rpartition(".")[2] for base in self.classes[name].bases]
            seen.add(name)
        return False

    @cached_property
    def tables(self) -> dict[str, set[str]]:
        """The names in each value that the module assigns, such as {"attention": Attention, "mamba": Mixer}."""
        return {
            target.id: names_in(node.value)
            for node in self.tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def own_methods(self, name: str) -> list[str]:
        """Methods that a class defines itself."""
        return [child.name for child in self.classes[name].body if isinstance(child, ast.FunctionDef)]

    def methods(self, method: str = "forward") -> Iterator[tuple[str, str]]:
        """Each class that defines `method` itself, and the method's symbol."""
        for name in self.classes:
            if method in self.own_methods(name):
                yield name, f"{name}.{method}"

    def bases(self, name: str) -> list[str]:
        """Names of a class's direct bases; empty for a class of another module."""
        node = self.classes.get(name)
        names = [base.id for base in node.bases if isinstance(base, ast.Name)] if node else []
        # A class of its own name is that of another module, which it hides.
        return [base for base in names if base != name]

    def text(self, symbol: str) -> str:
        """A symbol's source text; "" where there is none."""
        found = self.upstream.symbol(symbol)
        return found.text if found else ""

    def fingerprint(self, symbol: str) -> str | None:
        """A function's or method's fingerprint; None where there is none of that name."""
        if symbol not in self._fingerprints:
            text = self.text(symbol)
            self._fingerprints[symbol] = fingerprint(text) if text else None
        return self._fingerprints[symbol]

    def function(self, symbol: str) -> ast.FunctionDef:
        """The definition of a function or method that the module has."""
        definition = self.upstream.find(symbol)
        assert isinstance(definition, ast.FunctionDef)
        return definition

    def parameters(self, symbol: str) -> list[str]:
        """Names of a method's parameters, without self."""
        return [argument.arg for argument in self.function(symbol).args.args[1:]]

    def keywords(self, symbol: str) -> str | None:
        """What a function or method calls its `**kwargs`; None if it takes none."""
        parameter = self.function(symbol).args.kwarg
        return None if parameter is None else parameter.arg

    def count(self, symbol: str, pattern: str) -> int:
        """How often `pattern` matches in a function or method."""
        # Importing forms must not import a parser: most processes find their modules in the cache.
        import libcst as cst

        from opslot.patchgen.pattern import compile_pattern, find_matches

        (definition,) = cst.parse_module(_dedented(self.text(symbol))).body
        return len(find_matches(compile_pattern(pattern), definition))

    @cached_property
    def names(self) -> set[str]:
        """The names in the module, without attributes."""
        return names_in(self.tree)

    @cached_property
    def calls_by_method(self) -> dict[str, list[tuple[str, ast.Call]]]:
        """The calls in each method, with the name `f` for `f()` and `self.f` for `self.f()`."""
        return {
            f"{name}.{method.name}": list(_named_calls(method))
            for name, node in self.classes.items()
            for method in node.body
            if isinstance(method, ast.FunctionDef)
        }

    def calls(self, symbol: str, function: str) -> list[ast.Call]:
        """The calls of `function` in a method."""
        return [call for name, call in self.calls_by_method.get(symbol, ()) if name == function]

    def callers(self, *functions: str) -> dict[str, list[ast.Call]]:
        """The calls of any of `functions` in each method that calls them."""
        calls = {
            method: [call for name, call in found if name in functions]
            for method, found in self.calls_by_method.items()
        }
        return {method: found for method, found in calls.items() if found}

    def called_by_methods(self, function: str) -> bool:
        """Whether methods call it, and each that does has a `self` to hold a slot."""
        arguments = [self.function(method).args.args for method in self.callers(function)]
        return bool(arguments) and all(own and own[0].arg == "self" for own in arguments)


# Finds one kind of upstream code in a module, in the order of its text.
Form = Callable[[ModuleView], Iterator[Finding]]


@dataclass(frozen=True)
class Reviewed:
    """A row of an op's catalogue: the fingerprint of upstream code that was read and checked.

    Attributes:
        hash: of the function or method (`opslot.patchgen.fingerprint`).
        variant: the op's variant that computes the same.
        computes: what the code computes.
        seen: architectures that have it, and releases where it is not all of them.
        helper: fingerprint of the function that decides what the code means, as `rotate_half` does; None for no such
            function.
        args: the kernel's arguments, as source text for forms that use it.
        returns: what a method returns, `{call}` being the kernel's result; written like `args`.
    """

    hash: str
    variant: str
    computes: str
    seen: str
    helper: str | None = None
    args: str = ""
    returns: str = "{call}"


@dataclass(frozen=True)
class MethodForms:
    """Classes whose whole `forward` is the op; the slot is called in front of its body.

    Attributes:
        op: the op's name.
        rows: the reviewed bodies. In `args`, `{0}`, `{1}` stand for the method's parameters and `{rest}` for those
            that are not named, each preceded by a comma.
        helper: the method of the same class whose fingerprint is `Reviewed.helper`.
        candidate: whether a class that matches no row computes something of the op's kind.
        reason: why such a class is skipped.
        outside_decorators: as `PatchConfig.slot_method` has it.
        depends: further upstream symbols, as `module:symbol`, that the lock watches.
        synonyms: names that one attribute of such classes has; a class may have another of them than the row's.
    """

    op: str
    rows: tuple[Reviewed, ...]
    helper: str
    candidate: Callable[[str, str], bool]
    reason: str
    outside_decorators: bool = False
    depends: tuple[str, ...] = ()
    synonyms: tuple[str, ...] = ()

    def row(self, module: ModuleView, name: str) -> Reviewed | None:
        """The row that a class of the module matches, with the class's names of its attributes."""
        forward, helper = f"{name}.forward", f"{name}.{self.helper}"
        key = module.fingerprint(forward), module.fingerprint(helper)
        found = self._row_of(*key)
        if found is not None or not self.synonyms or key[0] is None:
            return found
        used = {
            word for word in self.synonyms if re.search(rf"self\.{word}\b", module.text(forward) + module.text(helper))
        }
        for own, other in ((own, other) for own in used for other in self.synonyms if len(used) == 1 and other != own):
            texts = [re.sub(rf"self\.{own}\b", f"self.{other}", module.text(symbol)) for symbol in (forward, helper)]
            found = self._row_of(*(fingerprint(text) if text else None for text in texts))
            if found is not None:
                args, returns = (text.replace(f"self.{other}", f"self.{own}") for text in (found.args, found.returns))
                return replace(found, hash=key[0], args=args, returns=returns)
        return None

    def _row_of(self, *key: str | None) -> Reviewed | None:
        return next((row for row in self.rows if (row.hash, row.helper) == key), None)

    def __call__(self, module: ModuleView) -> Iterator[Match | Skip]:
        for name, forward in module.methods():
            row = self.row(module, name)
            if row is not None:
                yield self._match(module, name, forward, row)
            elif self.candidate(name, module.text(forward)):
                yield Skip(name, self.op, self.reason)

    def _match(self, module: ModuleView, name: str, forward: str, row: Reviewed) -> Match:
        parameters = module.parameters(forward)
        named = {int(number) for number in re.findall(r"{(\d+)}", row.args)}
        rest = "".join(f", {p}" for index, p in enumerate(parameters) if index not in named)
        args, outside = row.args.format(*parameters, rest=rest), self.outside_decorators
        returns = row.returns.format(*parameters, call="{call}")

        def write(patch: PatchConfig) -> None:
            slot = Slot(self.op, row.variant)
            patch.slot_method(forward, slot, args=args, returns=returns, expects=row.hash, outside_decorators=outside)
            patch.dependencies.extend(self.depends)

        return Match(name, self.op, row.variant, write)


@dataclass(frozen=True)
class FunctionForms:
    """A function of the module whose calls in methods go through a slot.

    Attributes:
        op: the op's name.
        function: the function's name.
        rows: the reviewed bodies.
        reason: why another body, or one that is called elsewhere, is skipped.
    """

    op: str
    function: str
    rows: tuple[Reviewed, ...]
    reason: str

    def __call__(self, module: ModuleView) -> Iterator[Match | Skip]:
        found = module.fingerprint(self.function)
        if found is None:
            return
        row = next((row for row in self.rows if row.hash == found), None)
        if row is None or not module.called_by_methods(self.function):
            yield Skip(self.function, self.op, self.reason)
            return
        slot, expects = Slot(self.op, row.variant), {self.function: row.hash}
        yield Match(
            self.function, self.op, row.variant, lambda patch: patch.slot_calls(self.function, slot, expects=expects)
        )


def names_in(node: ast.AST) -> set[str]:
    """The names in a tree, without attributes."""
    return {name.id for name in find_nodes(ast.Name, node)}


def skip_callers(
    module: ModuleView,
    op: str,
    pattern: str,
    reason: str = "calls {function} in another way than the reviewed forms",
    matched: Collection[str] = (),
) -> Iterator[Skip]:
    """A skip for each class, but those `matched`, that calls a function whose whole name matches `pattern`.

    In the reason, `{function}` is that name.
    """
    seen = set(matched)
    for method, calls in module.calls_by_method.items():
        owner = method.partition(".")[0]
        functions = (name.removeprefix("self.") for name, _ in calls)
        function = next((function for function in functions if re.fullmatch(pattern, function)), None)
        if function is not None and owner not in seen:
            seen.add(owner)
            yield Skip(owner, op, reason.format(function=function))


def _named_calls(node: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for call in find_nodes(ast.Call, node):
        function = call.func
        if isinstance(function, ast.Name):
            yield function.id, call
        elif isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "self":
            yield f"self.{function.attr}", call


def _dedented(text: str) -> str:
    # Lines of a string literal may begin further to the left than the definition.
    indent = len(text) - len(text.lstrip())
    return "\n".join(line[indent:] if line[:indent].isspace() else line for line in text.splitlines()) + "\n"
