"""Modules outside Transformers: a user's, another package's, and those that ship with a checkpoint.

Only modules that are imported already are read, so nothing runs that did not run before.
"""

from __future__ import annotations

import ast
import os
import sys
import tokenize
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

from opslot._base.errors import PatchError
from opslot.patchgen.names import PACKAGE, architecture_in
from opslot.patchgen.upstream import Definition, UpstreamModule, find_nodes

# Packages of kernels, which their own classes of models call.
_KERNELS = frozenset({"causal_conv1d", "fla", "flash_attn", "liger_kernel", "mamba_ssm", "quack"})
# Packages whose modules compute nothing that an op replaces, or wrap modules of a model.
_LIBRARIES = _KERNELS | frozenset(
    {PACKAGE, "opslot", "torch", "torchvision", "torchaudio", "torchao", "triton", "numpy", "builtins"}
    | {"accelerate", "bitsandbytes", "deepspeed", "huggingface_hub", "kernels", "peft", "safetensors", "trl"}
)

# Decorators of classes that leave methods as they are, or that the classes derived from theirs have without them.
_KEEPS_METHODS = {
    "add_start_docstrings",
    "auto_docstring",
    "no_inherit_decorators",
    "requires",
    "use_experts_implementation",
    "use_kernel_forward_from_hub",
    "use_kernelized_func",
}


def may_be_read(module: str) -> bool:
    """Whether a module, by its name, is a user's: not one of Transformers, torch, or what wraps models."""
    top = module.partition(".")[0]
    return top not in _LIBRARIES and top not in sys.stdlib_module_names


def has_own_kernels(module: str) -> bool:
    """Whether a module, by its name, is of a package of kernels, whose code is not read."""
    return module.partition(".")[0] in _KERNELS


def read_module(name: str, version: str, read: Callable[[str], UpstreamModule]) -> UpstreamModule:
    """An imported module outside Transformers, with the definitions that it imports and that opslot may read.

    What a class calls in a module beside its own is so known by its code, and so is the model of layers in a file of
    their own, which makes their masks: its definitions follow too, if the modules in the folder have one such model.

    Args:
        version: of Transformers.
        read: reads a module of Transformers.

    Raises:
        PatchError: it is not imported, or has no Python source.
    """
    module = sys.modules.get(name)
    if module is None:
        raise PatchError(f"{name} is not imported", hint="import it, or name a module of transformers")
    text = source_of(module)
    own = UpstreamModule(name, version, text, _package_of(module))
    found = _Imported(own, read)
    for used in sorted(_names(own.tree)):
        found.add(name, used)
    for user, top in _model_around(own):
        found.add(user, top)
    added = "".join(f"\n\n{text.rstrip()}\n" for text in found.texts.values())
    names = frozenset(key.partition(".")[0] for key in own.definitions)
    parts = dict.fromkeys(part for part, _ in found.texts if architecture_in(part) is None)
    return UpstreamModule(name, version, f"{text.rstrip()}\n{added}", own.package, names, tuple(parts))


def source_of(module: ModuleType) -> str:
    """The text of a module's file.

    Raises:
        PatchError: it has none, or none that can be read as Python.
    """
    file = getattr(module, "__file__", None)
    if not file or not file.endswith(".py") or "/" in module.__name__:
        raise PatchError(
            f"{module.__name__} has no Python source file", hint="define the classes in a file, not in a notebook"
        )
    try:
        stat = os.stat(file)
        return _read(file, stat.st_mtime_ns, stat.st_size)
    except (OSError, SyntaxError, ValueError) as error:
        raise PatchError(f"{module.__name__}: {file} cannot be read", found=str(error), hint="restore it") from error


@lru_cache(maxsize=64)
def _read(file: str, modified: int, size: int) -> str:
    with tokenize.open(file) as opened:
        text = opened.read()
    ast.parse(text)
    return text


def _package_of(module: ModuleType) -> str:
    """What relative imports in a module start from; "" for a script, which has none."""
    package = getattr(module, "__package__", None)
    if package is None:
        return module.__name__ if hasattr(module, "__path__") else module.__name__.rpartition(".")[0]
    return str(package)


def _model_around(own: UpstreamModule) -> list[tuple[str, str]]:
    """The definitions of the module with the model that uses this module's layers, by module and name.

    None for a module with a model of its own, or if several beside it, in its folder, have one.
    """
    if _has_model(own.tree):
        return []
    folder = _folder_of(sys.modules[own.name])
    beside = {name: module for name, module in [*sys.modules.items()] if _folder_of(module) == folder}
    users, waiting = {own.name}, [own.name]
    while waiting:
        used = waiting.pop()
        new = [name for name, module in beside.items() if name not in users and _uses(module, used)]
        users.update(new)
        waiting += new
    models = []
    for name in sorted(users - {own.name}):
        try:
            tree = ast.parse(source_of(sys.modules[name]))
        except PatchError:
            continue
        if _has_model(tree):
            models.append([(name, node.name) for node in tree.body if isinstance(node, Definition)])
    return models[0] if len(models) == 1 else []


def _folder_of(module: ModuleType) -> str:
    return os.path.dirname(getattr(module, "__file__", None) or "")


def _uses(module: ModuleType, used: str) -> bool:
    """Whether a module has a class or function of another one."""
    return module.__name__ != used and any(
        isinstance(value, type | FunctionType) and value.__module__ == used for value in [*vars(module).values()]
    )


def _has_model(tree: ast.Module) -> bool:
    """Whether a module has a class that derives from PreTrainedModel, by its name."""
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return any(ast.unparse(base).endswith("PreTrainedModel") for node in classes for base in node.bases)


def _names(*roots: ast.AST) -> set[str]:
    return {node.id for node in find_nodes(ast.Name, *roots)}


class _Imported:
    """Definitions of other modules that a module uses under their own names.

    Attributes:
        texts: the source of each, by its module and name.
    """

    def __init__(self, own: UpstreamModule, read: Callable[[str], UpstreamModule]) -> None:
        self._own, self._read = own, read
        self._modules = {own.name: own}
        self._owners = dict.fromkeys((key for key in own.definitions if "." not in key), own.name)
        self.texts: dict[tuple[str, str], str] = {}

    def add(self, module: str, name: str) -> None:
        """Add what `name` means in a module, with what its code uses.

        Nothing where one of these names means something else in what was added before: code is judged by names.
        """
        needed: dict[tuple[str, str], str] = {}
        waiting = [(module, name)]
        while waiting:
            place = _definition_of(*waiting.pop())
            if place is None or place in needed or place in self.texts or place[0] == self._own.name:
                continue
            owner = self._owners.get(place[1], place[0])
            if owner != place[0] or any(place[1] == other for _, other in needed):
                return
            text, definition = self._text(*place)
            if definition is None:
                continue
            needed[place] = text
            waiting += [(place[0], used) for used in sorted(_names(definition))]
        self.texts |= needed
        self._owners |= {used: owner for owner, used in needed}

    def _text(self, module: str, name: str) -> tuple[str, Definition | None]:
        upstream = self._modules.get(module) or self._raw(module)
        if upstream is None:
            return "", None
        self._modules[module] = upstream
        symbol = upstream.symbol(name)
        return ("", None) if symbol is None else (symbol.text, upstream.find(name))

    def _raw(self, module: str) -> UpstreamModule | None:
        try:
            if architecture_in(module) is not None:
                return self._read(module)
            found = sys.modules[module]
            return UpstreamModule(module, self._own.version, source_of(found), _package_of(found))
        except (PatchError, KeyError):
            return None


def _definition_of(module: str, name: str) -> tuple[str, str] | None:
    """The module and name of the function or class that `name` is in a module; None for anything else.

    None also for one of a library, of a module of Transformers that defines no architecture, or of another name.
    """
    value: Any = getattr(sys.modules.get(module), name, None)
    if not isinstance(value, type | FunctionType) or value.__qualname__ != name:
        return None
    owner = value.__module__
    return (owner, name) if may_be_read(owner) or architecture_in(owner) is not None else None


def unchanged(cls: type, upstream: UpstreamModule) -> bool:
    """Whether the methods of a class are still those of its module's text: not replaced, nor edited since the import.

    Methods that a decorator wraps without a reference to them are not compared.
    """
    known = _codes(upstream.text)
    for name, value in vars(cls).items():
        function = getattr(value, "__func__", value)
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        code = getattr(function, "__code__", None)
        if code is None or not isinstance(function, FunctionType):
            continue
        written = upstream.find(f"{cls.__name__}.{name}")
        if written is None or code in known.get(f"{cls.__qualname__}.{name}", ()):
            continue
        if not written.decorator_list:
            return False
    return True


@lru_cache(maxsize=16)
def _codes(text: str) -> dict[str, list[Any]]:
    """The code objects of a module's text by qualified name."""
    found: dict[str, list[Any]] = {}

    def collect(code: Any) -> Iterator[Any]:
        for constant in code.co_consts:
            if hasattr(constant, "co_qualname"):
                yield constant
                yield from collect(constant)

    for code in collect(compile(text, "<module>", "exec", dont_inherit=True)):
        found.setdefault(code.co_qualname, []).append(code)
    return found


def changing_decorator(definition: ast.ClassDef) -> str:
    """The first decorator of a class that may change its methods, or ""."""
    for decorator in definition.decorator_list:
        name = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(name).rpartition(".")[2] not in _KEEPS_METHODS:
            return ast.unparse(decorator)
    return ""
