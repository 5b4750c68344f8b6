"""The primitives of the DSL that state replacement text: whole classes, functions and methods, imports and helpers.

No patch of opslot uses them. They are here for patches that other packages bring along, under the names that the
protocol gives them.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from opslot._base.errors import PatchError
from opslot.patchgen.edits import Edit, NameMap

T = TypeVar("T", bound="Callable[..., Any] | type | str")

_DSL_DECORATORS = {"replace_class", "replace_function", "override_method", "modify_init", "add_helper"}


@dataclass(frozen=True)
class Replacement(Edit):
    """Put the given text in the place of a class, a function or a method, or around a class's `__init__` body.

    Upstream's decorators stay on a method.
    """

    kind: Literal["class", "function", "method", "init"] = "class"
    text: str = ""
    name_map: NameMap = ()

    @property
    def symbols(self) -> tuple[str, ...]:
        return (f"{self.target}.__init__" if self.kind == "init" else self.target,)

    @property
    def whole(self) -> tuple[str, ...]:
        return () if self.kind == "init" else (self.target,)

    @property
    def action(self) -> str:
        if self.kind == "init":
            return f"extend {self.target}.__init__"
        # Whether a method is replaced or added is known once upstream's class is.
        return f"{'override' if self.kind == 'method' else 'replace'} {self.kind} {self.target}"


@dataclass(frozen=True)
class ExternalReplacement(Edit):
    """Import the class or function `target` from another package instead of defining it."""

    ACTION = "import {target} from {source_module}.{source_name}"

    source_module: str = ""
    source_name: str = ""

    @property
    def whole(self) -> tuple[str, ...]:
        return (self.target,)


class TextPrimitives:
    """Part of `PatchConfig`.

    A replacement is a decorated class or function, or `replacement=`. Its text is used as written, so the names in it
    must exist in the generated module.
    """

    edits: list[Edit]
    post_import_blocks: list[str]
    helpers: list[str]
    dropped_imports: list[str]

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
        """Replace a method's signature and body, or add the method; upstream's decorators stay.

        Adding a method whose name resembles one of upstream's logs a warning.
        """
        return self._replacement("method", target, replacement, name_map, description)

    def modify_init(
        self, name: str, replacement: Any = None, *, name_map: Mapping[str, str] | None = None, description: str = ""
    ) -> Any:
        """Add statements to a class's `__init__`.

        They go to its end, before a final `self.post_init()`. In a replacement that calls
        `original_init(...)`, what is before that call goes before upstream's body, and the rest after it.
        """
        return self._replacement("init", name, replacement, name_map, description)

    def _replacement(
        self, kind: Any, target: str, replacement: Any, name_map: Mapping[str, str] | None, description: str
    ) -> Any:
        def add(obj: T) -> T:
            self.edits.append(
                Replacement(target, description, kind=kind, text=_text_of(obj), name_map=pairs_of(name_map))
            )
            return obj

        return add if replacement is None else add(replacement)

    def drop_import_names(self, *names: str) -> None:
        """Drop names from upstream's imports."""
        self.dropped_imports.extend(names)

    def add_post_import_block(self, text: str) -> None:
        """Add source text after the imports."""
        self.post_import_blocks.append(require_python(textwrap.dedent(text).strip("\n"), "add_post_import_block"))

    def add_helper(self, obj: T) -> T:
        """Add a function or class after the imports; usable as a decorator."""
        self.helpers.append(require_python(obj, "add_helper") if isinstance(obj, str) else _text_of(obj))
        return obj


def create_patch_from_external(
    target: str, source_module: str, source_name: str | None = None, *, description: str = ""
) -> ExternalReplacement:
    """An edit for `PatchConfig.edits`: take `target` from another package, under upstream's name."""
    return ExternalReplacement(target, description, source_module=source_module, source_name=source_name or target)


def require_python(text: str, method: str) -> str:
    """`text`; raises unless it is statements of Python."""
    try:
        statements = ast.parse(text).body
    except SyntaxError as error:
        raise PatchError(
            f"{method}: the text is not Python code", found=str(error), hint="give whole statements"
        ) from error
    if not statements:
        raise PatchError(f"{method}: the text has no statement", found=repr(text), hint="give whole statements")
    return text


def pairs_of(name_map: Mapping[str, str] | None) -> NameMap:
    """A name map as a frozen edit holds it."""
    return tuple((name_map or {}).items())


def _text_of(obj: Callable[..., Any] | type | str) -> str:
    """Source text of a class or function, with its comments above and without the decorators of this module."""
    if isinstance(obj, str):
        return textwrap.dedent(obj).strip("\n") + "\n"
    if getattr(obj, "__name__", "") == "<lambda>":
        raise PatchError("a replacement is a lambda, whose source cannot be read", hint="define a function")
    try:
        text = textwrap.dedent(inspect.getsource(obj))
    except (OSError, TypeError) as error:
        raise PatchError(f"the source of {obj!r} cannot be read ({error})", hint="define it in a file") from error
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
