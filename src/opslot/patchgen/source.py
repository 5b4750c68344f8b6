"""Upstream's text: where a Transformers release is on disk, and the symbols of its modules and of others."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.util
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TypeVar

from opslot._base.errors import PatchError

PACKAGE = "transformers"

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Node = TypeVar("_Node", bound=ast.AST)

# Architectures in the folder of another one, or in one of several.
_FOLDERS = {
    "blip_text": "blip",
    "data2vec_audio": "data2vec",
    "data2vec_text": "data2vec",
    "data2vec_vision": "data2vec",
    "donut_swin": "donut",
    "maskformer_swin": "maskformer",
}


# Of the names of architectures outside Transformers. No folder under `transformers/models` begins so.
_ELSEWHERE = "from__"
# Underscores that `__` for a dot would make ambiguous.
_AMBIGUOUS = re.compile(r"(?<![^._])_|_(?=[._]|5f|$)")


def modeling_module(arch: str) -> str:
    """The module that defines an architecture: in Transformers that of its folder, but for a few.

    The inverse of `architecture_in` and of `architecture_from`.
    """
    if arch.startswith(_ELSEWHERE):
        return arch.removeprefix(_ELSEWHERE).replace("__", ".").replace("_5f", "_")
    return f"{PACKAGE}.models.{_FOLDERS.get(arch, arch)}.modeling_{arch}"


def architecture_in(module: str) -> str | None:
    """The architecture that a module of Transformers defines; None for other modules."""
    arch = module.rpartition(".modeling_")[2]
    return arch if module == modeling_module(arch) else None


def architecture_from(module: str) -> str:
    """The name of the architecture in any module: as `architecture_in`, else one that only that module has.

    `my_package.modeling_mine` is `from__my_package__modeling_mine`. Underscores next to others or to dots are `_5f`.
    """
    return architecture_in(module) or _ELSEWHERE + _AMBIGUOUS.sub("_5f", module).replace(".", "__")


def is_elsewhere(arch: str) -> bool:
    """Whether an architecture is in a module outside Transformers."""
    return arch.startswith(_ELSEWHERE)


@dataclass(frozen=True)
class Release:
    """One Transformers release; `root` is the directory of its `transformers` package."""

    version: str
    root: Path
    _modules: dict[str, UpstreamModule] = field(default_factory=dict, repr=False, compare=False)

    def path(self, module: str) -> Path:
        """File of a module below `transformers`."""
        package, *rest = module.split(".")
        if package != PACKAGE:
            raise PatchError(f"{module} is not a module of {PACKAGE}", hint=f"name one that starts with {PACKAGE}.")
        path = self.root.joinpath(*rest)
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def module(self, name: str) -> UpstreamModule:
        """The module of that dotted name; those of Transformers are read once.

        Raises:
            PatchError: the release has no such module, or a module outside Transformers is not imported or has no
                source.
        """
        if name not in self._modules and name.partition(".")[0] != PACKAGE:
            from opslot.patchgen.own_code import read_module

            self._modules[name] = read_module(name, self)
        if name not in self._modules:
            path = self.path(name)
            try:
                text = path.read_text(encoding="utf-8")
            except FileNotFoundError:
                raise PatchError(
                    f"{PACKAGE} {self.version} has no module {name}",
                    found=f"no file {path}",
                    hint="use a release that has it",
                ) from None
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            self._modules[name] = UpstreamModule(name, self.version, text, package)
        return self._modules[name]


@dataclass(frozen=True)
class Symbol:
    """A definition's text, with decorators, and the number of its first line in the module."""

    name: str
    text: str
    first_line: int

    @property
    def digest(self) -> str:
        """Hash of the code alone: comments, docstring, blank lines and trailing spaces do not count."""
        return _short_hash("\n".join(text for _, text in self.code_lines))

    @cached_property
    def code_lines(self) -> list[tuple[int, str]]:
        """Line number in the module and code of each line that holds code."""
        return [(self.first_line + index, line) for index, line in _code_lines(self.text)]

    @cached_property
    def line_digests(self) -> list[str]:
        """A short hash of each line in `code_lines`, enough to tell which lines changed."""
        return [_short_hash(text)[:6] for _, text in self.code_lines]


@dataclass(frozen=True)
class UpstreamModule:
    """The text of one upstream module.

    Attributes:
        name: its dotted name.
        version: of Transformers.
        text: its source. Of a module outside Transformers, the definitions that it imports follow.
        package: what relative imports start from.
        own: of a module outside Transformers, the functions and classes that are its own; None for Transformers',
            whose definitions all are.
        parts: the other modules outside Transformers that `text` has definitions of.
    """

    name: str
    version: str
    text: str
    package: str = ""
    own: frozenset[str] | None = None
    parts: tuple[str, ...] = ()

    def is_own(self, symbol: str) -> bool:
        """Whether a function, class or method is the module's own, not imported."""
        return self.own is None or symbol.partition(".")[0] in self.own

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.splitlines(keepends=True)

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        """Classes, their methods as `Class.method`, and functions, by name; the last one wins, as it does in Python."""
        found: dict[str, Definition] = {}
        for statement in self.tree.body:
            if isinstance(statement, Definition):
                found[statement.name] = statement
                inside = statement.body if isinstance(statement, ast.ClassDef) else []
                found |= {f"{statement.name}.{child.name}": child for child in inside if isinstance(child, Definition)}
        return found

    def find(self, name: str) -> Definition | None:
        """The definition called `name`."""
        return self.definitions.get(name)

    def symbol(self, name: str) -> Symbol | None:
        """The text of a definition; None if the module has no such definition."""
        definition = self.find(name)
        if definition is None:
            return None
        first = min([definition.lineno, *(decorator.lineno for decorator in definition.decorator_list)])
        text = "".join(self._lines[first - 1 : definition.end_lineno])
        return Symbol(name, text, first)

    def require(self, name: str) -> Symbol:
        """Like `symbol`, but raises PatchError with similar names if it is missing."""
        found = self.symbol(name)
        if found is None:
            raise PatchError(
                f"{self.name} of transformers {self.version}: {self.missing(name)}", hint="name one that it has"
            )
        return found

    def missing(self, name: str) -> str:
        """The message for a symbol that the module does not have, with the nearest names."""
        close = difflib.get_close_matches(name, self.definitions, n=5, cutoff=0.4)
        hint = f"; similar names: {', '.join(close)}" if close else ""
        return f"it has no {name}{hint}"


@lru_cache(maxsize=2048)
def nodes_below(root: ast.AST) -> tuple[ast.AST, ...]:
    """The nodes that `ast.walk` yields, without contexts such as ast.Load; for trees that do not change."""
    nodes = [root]
    for node in nodes:
        for name in node._fields:
            value = getattr(node, name, None)
            if type(value) is list:
                nodes += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST) and name != "ctx":
                nodes.append(value)
    return tuple(nodes)


def find_nodes(kind: type[_Node], *roots: ast.AST | None) -> Iterator[_Node]:
    """The nodes of a kind among those of `nodes_below`; none for a root that is None."""
    return (node for root in roots if root is not None for node in nodes_below(root) if isinstance(node, kind))


def installed_release() -> Release:
    """The release that `import transformers` would load, found without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise PatchError("transformers is not installed", hint="install it with `pip install 'transformers>=5.9'`")
    root = Path(spec.origin).parent
    return Release(read_version(root), root)


def read_version(root: Path) -> str:
    """`__version__` of the package at `root`, read from its text."""
    text = (root / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__ = [\"']([^\"']+)[\"']", text, re.MULTILINE)
    if found is None:
        raise PatchError(
            f"{root / '__init__.py'} names no __version__", hint="give the folder of a Transformers release"
        )
    return found.group(1)


def _code_lines(text: str) -> list[tuple[int, str]]:
    """Index and text of each line with code, docstrings and comments removed."""
    lines = text.splitlines()
    indent = re.match(r"\s*", text).group()  # type: ignore[union-attr]
    dedented = "\n".join(line.removeprefix(indent) for line in lines) + "\n"
    docstring_lines: set[int] = set()
    for node in ast.walk(ast.parse(dedented)):
        if isinstance(node, Definition) and ast.get_docstring(node, clean=False) is not None:
            expression = node.body[0]
            docstring_lines.update(range(expression.lineno, (expression.end_lineno or 0) + 1))
    kept = dedented.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(dedented).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            kept[row - 1] = kept[row - 1][:column]
    return [
        (index, line.rstrip()) for index, line in enumerate(kept) if line.strip() and index + 1 not in docstring_lines
    ]


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
