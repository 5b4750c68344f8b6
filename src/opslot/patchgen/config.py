"""`PatchConfig`: what a patch file writes down."""

from __future__ import annotations

import ast
import hashlib
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from opslot._base.errors import PatchError
from opslot.patchgen.classifier_losses import classifier_form
from opslot.patchgen.edits import (
    Anchored,
    ClassAttribute,
    ConfigSlot,
    Decorate,
    Edit,
    Exclude,
    ImportSpec,
    InheritMethod,
    Slot,
    SlotCalls,
    SlotLoss,
    SlotMethod,
    TakeKeywords,
    UndecoratedCopy,
    rename,
)
from opslot.patchgen.primitives import TextPrimitives, pairs_of, require_python


class PatchConfig(TextPrimitives):
    """The edits that turn one upstream modeling module into opslot's.

    Edits apply in the order they are written, exclusions last. The primitives that state replacement text are in
    `TextPrimitives`.

    Args:
        source_module: dotted name of the upstream module, such as `transformers.models.qwen3.modeling_qwen3`.
        target_file: file name of the generated module; the upstream file's name by default.
        description: one line for the generated header and `patchgen --list`.
        discover: in `models/<arch>/patch.py`, add these edits to those that discovery finds. False: these are all.
    """

    def __init__(
        self, source_module: str, *, target_file: str | None = None, description: str = "", discover: bool = True
    ) -> None:
        # A user's module may have a name without dots, and is imported.
        if "." not in source_module and source_module not in sys.modules:
            raise PatchError(
                f"PatchConfig of {source_module!r}, which is not a dotted module name",
                hint="name one such as transformers.models.qwen3.modeling_qwen3",
            )
        if target_file and (Path(target_file).name != target_file or not target_file.endswith(".py")):
            raise PatchError(
                f"target_file={target_file!r} is not the name of a Python file",
                hint='give a name without folders, such as "modeling_mine.py"',
            )
        self.source_module = source_module
        self.target_file = target_file or source_module.rpartition(".")[2] + ".py"
        self.description = description
        self.discover = discover
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
        slot: Slot,
        *,
        args: str,
        returns: str = "{call}",
        expects: str | Iterable[str] = (),
        outside_decorators: bool = False,
        parameters: Iterable[str] = (),
    ) -> None:
        """Call the slot's kernel instead of a method's body while a kernel is bound.

        Args:
            target: `Class.method`.
            slot: the op and variant that the method's body computes.
            args: positional arguments of the kernel, as source text in the method's scope.
            returns: what the method returns, `{call}` being the kernel's result.
            expects: fingerprints that the body may have; any other raises, since the slot would then replace
                a body with another meaning.
            outside_decorators: test the slot before the class's decorators see the call. Needed where a decorator
                swaps the method, as `use_experts_implementation` does.
            parameters: outside the decorators, other parameters than the method's, which callers pass while a kernel is
                bound.
        """
        _require_method(target, slot)
        self.edits.append(
            SlotMethod(
                target,
                slot=slot,
                args=args,
                returns=returns,
                outside_decorators=outside_decorators,
                parameters=tuple(parameters),
                expects=_fingerprints(expects),
            )
        )

    def slot_calls(
        self,
        function: str,
        slot: Slot,
        *,
        expects: Mapping[str, str | Iterable[str]] | None = None,
        count: int | None = None,
    ) -> None:
        """Route every call of `function` inside a method through a slot of the calling class.

        `expects` maps the function, and each helper it relies on, to the fingerprints they may have. `count` is
        the number of calls; without it, at least one.
        """
        hashes = tuple((name, _fingerprints(values)) for name, values in (expects or {}).items())
        self.edits.append(SlotCalls(function, slot=slot, expects=hashes, count=count))

    def slot_expr(self, scope: str, slot: Slot, pattern: str, *, args: str, count: int = 1) -> None:
        """Compute an expression with the slot's kernel while one is bound; `args` may use the pattern's `$names`."""
        _require_method(scope, slot)
        bound = f"self.{slot.attribute}"
        template = f"{bound}({args}) if {bound} is not None else $match"
        self.edits.append(Anchored(scope, patterns=(pattern,), template=template, count=count, slot=slot))

    def slot_loss(self, target: str, slot: Slot) -> None:
        """Let a kernel compute the loss from hidden states and the head's weight.

        The variant `causal` covers the statements from the logits to the loss, with scaling and softcap, and skips the
        logits (in the forms of `opslot.patchgen.losses`); the variant `sequence_classification` replaces the loss
        of Transformers' generic classifiers of sequences and of tokens. Anything else raises when the module is
        generated.
        """
        _require_method(target, slot)
        if slot.variant == "causal":
            self.edits.append(SlotLoss(target, slot=slot))
        elif slot.variant == "sequence_classification":
            pattern, template = classifier_form(target, slot)
            self.edits.append(Anchored(target, patterns=(pattern,), template=template, slot=slot))
        else:
            raise PatchError(
                "slot_loss has the variants causal and sequence_classification",
                found=repr(slot.variant),
                hint="use PatchConfig.replace with a slot for another form",
            )

    def replace(
        self,
        scope: str,
        pattern: str | Iterable[str],
        replacement: str,
        *,
        count: int = 1,
        slot: Slot | None = None,
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
        slot: Slot | None,
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

    def copy_undecorated(self, function: str, name: str) -> None:
        """Copy, when the module is generated, upstream's text of a function without its decorators, once.

        A decorator may replace a function by that of another package where it is installed.
        """
        edit = UndecoratedCopy(function, name=name)
        if edit not in self.edits:
            self.edits.append(edit)

    def depends_on(self, module: str, *symbols: str) -> None:
        """Name upstream symbols that the patch relies on without touching them; the lock then watches them."""
        self.dependencies.extend(f"{module}:{symbol}" for symbol in symbols)

    def exclude_from_output(self, *names: str) -> None:
        """Leave classes or functions out of the generated module, with what only they used.

        All that a patch excludes is removed together, after its other edits, so it may use each other in any order.
        """
        if not names:
            raise PatchError("exclude_from_output needs at least one name", hint="name classes or functions")
        first, *others = names
        self.edits.append(Exclude(first, others=tuple(others)))

    def slot_config(self, classes: Iterable[str], slot: Slot, *, depends: Iterable[str] = ()) -> None:
        """Declare an op that is chosen through the model's config, not by an edit, as attention is.

        Args:
            classes: the classes whose `forward` reads the config.
            slot: the op and variant.
            depends: further symbols that the op relies on.
        """
        first, *others = classes
        self.edits.append(ConfigSlot(first, slot=slot, others=tuple(others), depends=tuple(depends)))

    def set_attribute(self, class_name: str, attribute: str, value: Any) -> None:
        """Set an attribute of a class to a literal value."""
        try:
            is_literal = attribute.isidentifier() and ast.literal_eval(repr(value)) == value
        except (ValueError, SyntaxError):
            is_literal = False
        if not is_literal:
            raise PatchError(
                "set_attribute needs a name and a literal value",
                found=f"{attribute} = {value!r}",
                hint="set other values in a block of add_final_block",
            )
        self.edits.append(ClassAttribute(class_name, attribute=attribute, value=value))

    def decorate(self, target: str, module: str, decorator: str) -> None:
        """Put `decorator`, a function of `module`, above all decorators of a method."""
        self.edits.append(Decorate(target, module=module, decorator=decorator))

    def take_keywords(self, target: str) -> None:
        """Add `**kwargs` to the parameters of a method that has none."""
        self.edits.append(TakeKeywords(target))

    def add_import(
        self, module: str, names: Iterable[str] = (), *, alias: str | None = None, is_from_import: bool | None = None
    ) -> None:
        """Add `from module import names`, or `import module [as alias]` when no names are given, once."""
        names = tuple(names)
        if is_from_import is not None and is_from_import != bool(names):
            raise PatchError(
                f"add_import({module!r}): a from-import needs names, a plain import takes none",
                hint="give names, or leave out is_from_import",
            )
        spec = ImportSpec(module, names, alias)
        require_python(spec.statement, "add_import")
        if spec not in self.additional_imports:
            self.additional_imports.append(spec)

    def add_final_block(self, text: str) -> None:
        """Add source text at the module's end."""
        self.final_blocks.append(require_python(textwrap.dedent(text).strip("\n"), "add_final_block"))

    def extend(self, sibling: PatchConfig, *, name_map: Mapping[str, str] | None = None) -> None:
        """Add a sibling's edits, imports, blocks and helpers, with prefixes of names exchanged by `name_map`."""
        names = pairs_of(name_map)
        self.edits.extend(edit.renamed(names) if names else edit for edit in sibling.edits)
        self.additional_imports.extend(sibling.additional_imports)
        self.dropped_imports.extend(sibling.dropped_imports)
        for name in ("post_import_blocks", "final_blocks", "helpers", "dependencies"):
            getattr(self, name).extend(rename(text, names) for text in getattr(sibling, name))

    @property
    def slots(self) -> tuple[str, ...]:
        """Each slot as "symbol op/variant", in the order of the edits."""
        slots = ((edit.target, getattr(edit, "slot", None)) for edit in self.edits)
        return tuple(dict.fromkeys(f"{target} {slot}" for target, slot in slots if slot is not None))

    @property
    def upstream_modules(self) -> tuple[str, ...]:
        """Every upstream module whose text the generated module depends on, the patched one first."""
        inherited = (edit.from_module for edit in self.edits if isinstance(edit, InheritMethod))
        return tuple(dict.fromkeys((self.source_module, *inherited)))

    @property
    def digest(self) -> str:
        """Hash of everything in the patch."""
        parts = (
            self.source_module,
            self.target_file,
            self.description,
            self.discover,
            self.edits,
            self.additional_imports,
            self.post_import_blocks,
            self.final_blocks,
            self.helpers,
            self.dropped_imports,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def _require_method(target: str, slot: Slot) -> None:
    if target.count(".") != 1:
        raise PatchError(f"slot {slot} is not in a method", found=repr(target), hint="name one as Class.method")


def _fingerprints(values: str | Iterable[str]) -> tuple[str, ...]:
    return (values,) if isinstance(values, str) else tuple(values)
