"""`PatchConfig`: what a patch file writes down."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from opslot._base.errors import PatchError
from opslot.patchgen.edits import (
    Anchored,
    Edit,
    Exclude,
    Expectations,
    ExternalReplacement,
    ImportSpec,
    InheritMethod,
    ModifyInit,
    OpSlot,
    Replacement,
    SlotCalls,
    SlotMethod,
)
from opslot.patchgen.losses import loss_form

T = TypeVar("T", bound="Callable[..., Any] | type | str")

_DSL_DECORATORS = {"replace_class", "replace_function", "override_method", "modify_init", "add_helper"}


class PatchConfig:
    """The edits that turn one upstream modeling module into opslot's.

    Edits apply in the order they are written. A replacement may be given as a decorated class or function, or as
    `replacement=`; its text is taken as written, so names it uses must exist in the generated module.

    Args:
        source_module: dotted name of the upstream module, such as `transformers.models.qwen3.modeling_qwen3`.
        target_file: file name of the generated module; the upstream file's name by default.
        description: one line for the generated header and `patchgen --list`.
    """

    def __init__(self, source_module: str, *, target_file: str | None = None, description: str = "") -> None:
        if "." not in source_module:
            raise PatchError(f"PatchConfig needs a dotted module name, got {source_module!r}")
        self.source_module = source_module
        self.target_file = target_file or source_module.rpartition(".")[2] + ".py"
        self.description = description
        self.edits: list[Edit] = []
        self.additional_imports: list[ImportSpec] = []
        self.post_import_blocks: list[str] = []
        self.final_blocks: list[str] = []
        self.helpers: list[str] = []
        self.dropped_imports: list[str] = []
        self.dependencies: list[str] = []

    def slot_method(
        self,
        target: str,
        slot: OpSlot,
        *,
        args: str,
        expects: str | Iterable[str] = (),
        outside_decorators: bool = False,
    ) -> None:
        """Call the slot's kernel instead of a method's body while a kernel is bound.

        Args:
            target: `Class.method`.
            slot: the op and variant that the method's body computes.
            args: positional arguments of the kernel, as source text in the method's scope.
            expects: fingerprints that the body may have; any other raises, since the slot would then stand for
                a body with another meaning.
            outside_decorators: test the slot before the class's decorators see the call. Needed where a decorator
                swaps the method, as `use_experts_implementation` does.
        """
        _require_method(target, slot)
        self.edits.append(
            SlotMethod(
                target,
                slot=slot,
                args=args,
                outside_decorators=outside_decorators,
                expects=_fingerprints(expects),
            )
        )

    def slot_calls(
        self,
        function: str,
        slot: OpSlot,
        *,
        expects: Mapping[str, str | Iterable[str]] | None = None,
        count: int | None = None,
    ) -> None:
        """Route every call of `function` inside a method through a slot of the calling class.

        `expects` maps the function, and each helper it relies on, to the fingerprints they may have. `count` is
        the number of calls; without it, at least one.
        """
        self.edits.append(SlotCalls(function, slot=slot, expects=_expectations(expects), count=count))

    def slot_expr(self, scope: str, slot: OpSlot, pattern: str, *, args: str, count: int = 1) -> None:
        """Compute an expression with the slot's kernel while one is bound; `args` may use the pattern's `$names`."""
        _require_method(scope, slot)
        bound = f"self.{slot.attribute}"
        template = f"{bound}({args}) if {bound} is not None else $match"
        self.edits.append(Anchored(scope, patterns=(pattern,), template=template, count=count, slot=slot))

    def slot_loss(self, target: str, slot: OpSlot) -> None:
        """Let a kernel compute the loss straight from hidden states and the head's weight.

        The variant `causal` covers the statements from the logits to the loss, and skips the logits; the variant
        `sequence_classification` replaces the loss alone. Anything else between them, such as a soft cap, raises.
        """
        _require_method(target, slot)
        patterns, template = loss_form(slot)
        self.edits.append(Anchored(target, patterns=patterns, template=template, slot=slot))

    def replace(
        self,
        scope: str,
        pattern: str | Iterable[str],
        replacement: str,
        *,
        count: int = 1,
        slot: OpSlot | None = None,
        note: str = "",
    ) -> None:
        """Replace each match of `pattern` in `scope`.

        A pattern is source text in which `$name` stands for one expression and `$*name` for the remaining
        arguments of a call; it matches by structure, whatever the formatting. Several alternatives may be given.
        The replacement may use those names, and `$match` for what matched.
        """
        self._anchor(scope, pattern, replacement, "replace", count, slot, note)

    def insert_before(
        self, scope: str, pattern: str | Iterable[str], statements: str, *, count: int = 1, note: str = ""
    ) -> None:
        """Insert statements before the statement that `pattern` matches, or that holds the match."""
        self._anchor(scope, pattern, statements, "insert_before", count, None, note)

    def insert_after(
        self, scope: str, pattern: str | Iterable[str], statements: str, *, count: int = 1, note: str = ""
    ) -> None:
        """Insert statements after the statement that `pattern` matches, or that holds the match."""
        self._anchor(scope, pattern, statements, "insert_after", count, None, note)

    def _anchor(
        self,
        scope: str,
        pattern: str | Iterable[str],
        template: str,
        mode: Any,
        count: int,
        slot: OpSlot | None,
        note: str,
    ) -> None:
        if slot is not None:
            _require_method(scope, slot)
        patterns = (pattern,) if isinstance(pattern, str) else tuple(pattern)
        self.edits.append(
            Anchored(
                scope,
                note,
                patterns=tuple(textwrap.dedent(text).strip("\n") for text in patterns),
                template=textwrap.dedent(template).strip("\n"),
                mode=mode,
                count=count,
                slot=slot,
            )
        )

    def inherit_method(self, target: str, from_module: str, from_symbol: str) -> None:
        """Copy, when the module is generated, upstream's text of an inherited method into the class.

        The names that the method uses are imported from where its own module has them, and `super()` keeps the
        meaning it has there.
        """
        self.edits.append(InheritMethod(target, from_module=from_module, from_symbol=from_symbol))

    def depends_on(self, module: str, *symbols: str) -> None:
        """Name upstream symbols that the patch relies on without touching them; the lock then watches them."""
        self.dependencies.extend(f"{module}:{symbol}" for symbol in symbols)

    def replace_class(
        self, name: str, replacement: Any = None, *, name_map: Mapping[str, str] | None = None, description: str = ""
    ) -> Any:
        """Replace a class, decorators included."""
        return self._replacement("class", name, replacement, name_map, description)

    def replace_function(
        self, name: str, replacement: Any = None, *, name_map: Mapping[str, str] | None = None, description: str = ""
    ) -> Any:
        """Replace a module-level function, decorators included."""
        return self._replacement("function", name, replacement, name_map, description)

    def override_method(
        self, target: str, replacement: Any = None, *, name_map: Mapping[str, str] | None = None, description: str = ""
    ) -> Any:
        """Replace a method's signature and body, or add the method; upstream's decorators stay."""
        return self._replacement("method", target, replacement, name_map, description)

    def modify_init(
        self, name: str, replacement: Any = None, *, name_map: Mapping[str, str] | None = None, description: str = ""
    ) -> Any:
        """Add statements to a class's `__init__`.

        They go to its end, before a final `self.post_init()`. A replacement that calls `original_init(...)` says
        itself what goes before and what after upstream's body.
        """

        def add(obj: T) -> T:
            self.edits.append(ModifyInit(name, description, text=_text_of(obj), name_map=_pairs(name_map)))
            return obj

        return add if replacement is None else add(replacement)

    def _replacement(
        self, kind: Any, target: str, replacement: Any, name_map: Mapping[str, str] | None, description: str
    ) -> Any:
        def add(obj: T) -> T:
            self.edits.append(
                Replacement(target, description, kind=kind, text=_text_of(obj), name_map=_pairs(name_map))
            )
            return obj

        return add if replacement is None else add(replacement)

    def exclude_from_output(self, *names: str) -> None:
        """Leave classes or functions out of the generated module, with what only they used."""
        self.edits.extend(Exclude(name) for name in names)

    def add_import(
        self, module: str, names: Iterable[str] = (), *, alias: str | None = None, is_from_import: bool | None = None
    ) -> None:
        """Add `from module import names`, or `import module [as alias]` when no names are given."""
        names = tuple(names)
        if is_from_import is not None and is_from_import != bool(names):
            raise PatchError(f"add_import({module!r}): a from-import needs names, a plain import takes none")
        self.additional_imports.append(ImportSpec(module, names, alias))

    def drop_import_names(self, *names: str) -> None:
        """Drop names from upstream's imports."""
        self.dropped_imports.extend(names)

    def add_post_import_block(self, text: str) -> None:
        """Add source text after the imports."""
        self.post_import_blocks.append(textwrap.dedent(text).strip("\n"))

    def add_final_block(self, text: str) -> None:
        """Add source text at the module's end."""
        self.final_blocks.append(textwrap.dedent(text).strip("\n"))

    def add_helper(self, obj: T) -> T:
        """Add a function or class after the imports; usable as a decorator."""
        self.helpers.append(obj if isinstance(obj, str) else _text_of(obj))
        return obj

    def extend(self, sibling: PatchConfig) -> None:
        """Take over a sibling's edits, imports, blocks and helpers."""
        self.edits.extend(sibling.edits)
        self.additional_imports.extend(sibling.additional_imports)
        self.post_import_blocks.extend(sibling.post_import_blocks)
        self.final_blocks.extend(sibling.final_blocks)
        self.helpers.extend(sibling.helpers)
        self.dropped_imports.extend(sibling.dropped_imports)
        self.dependencies.extend(sibling.dependencies)

    @property
    def upstream_modules(self) -> tuple[str, ...]:
        """Every upstream module whose text the generated module depends on, the patched one first."""
        inherited = (edit.from_module for edit in self.edits if isinstance(edit, InheritMethod))
        return tuple(dict.fromkeys((self.source_module, *inherited)))

    @property
    def digest(self) -> str:
        """Hash of everything the patch says."""
        parts = (
            self.source_module,
            self.target_file,
            self.description,
            self.edits,
            self.additional_imports,
            self.post_import_blocks,
            self.final_blocks,
            self.helpers,
            self.dropped_imports,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def create_patch_from_external(
    target: str, source_module: str, source_name: str | None = None, *, description: str = ""
) -> ExternalReplacement:
    """An edit for `PatchConfig.edits`: take `target` from another package, under upstream's name."""
    return ExternalReplacement(target, description, source_module=source_module, source_name=source_name or target)


def _require_method(target: str, slot: OpSlot) -> None:
    if target.count(".") != 1:
        raise PatchError(f"slot {slot} has to sit in a method, `Class.method`; got {target!r}")


def _fingerprints(values: str | Iterable[str]) -> tuple[str, ...]:
    return (values,) if isinstance(values, str) else tuple(values)


def _expectations(expects: Mapping[str, str | Iterable[str]] | None) -> Expectations:
    return tuple((name, _fingerprints(values)) for name, values in (expects or {}).items())


def _pairs(name_map: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    return tuple((name_map or {}).items())


def _text_of(obj: Callable[..., Any] | type | str) -> str:
    """Source text of a class or function, with its comments above and without the decorators of this module."""
    if isinstance(obj, str):
        return textwrap.dedent(obj).strip("\n") + "\n"
    try:
        text = textwrap.dedent(inspect.getsource(obj))
    except (OSError, TypeError) as error:
        raise PatchError(f"the source of {obj!r} cannot be read ({error}); define it in a file") from error
    lines = text.splitlines(keepends=True)
    (definition,) = ast.parse(text).body
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    for decorator in definition.decorator_list:
        callee = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(callee, ast.Attribute) and callee.attr in _DSL_DECORATORS:
            for line in range(decorator.lineno - 1, decorator.end_lineno or decorator.lineno):
                lines[line] = ""
    comments = textwrap.dedent(inspect.getcomments(obj) or "")
    return comments + "".join(lines)
