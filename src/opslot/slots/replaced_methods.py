"""Methods that the user or another library replaced on a class of Transformers itself.

Liger-Kernel's `apply_liger_kernel_to_...` functions do that before a model is made.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

from opslot.slots.protocol import original_of

# Packages whose decorators wrap methods of Transformers, and of generated classes.
_WRAPPERS = frozenset({"transformers", "torch", "kernels", "contextlib", "functools", "opslot"})
_DOCUMENTS = re.compile("cu_seqlens|by_document|documents_for|^create_.*mask")


def replaced_methods(cls: Any, generated: type) -> dict[str, Any]:
    """The methods of a class of Transformers that are not those of its module's text, by name.

    They were replaced or added, or call a function of the module that was replaced. Constructors are left out, which
    have run. Those of base classes in the same module are included.

    Args:
        generated: the class that was generated from it.
    """
    functions = _replaced_functions(sys.modules[cls.__module__], sys.modules[generated.__module__])
    found: dict[str, Any] = {}
    seen = {"__init__"}
    for base in cls.__mro__:
        if base.__module__ != cls.__module__:
            break
        own = {name: value for name, value in vars(base).items() if name not in seen}
        found |= {
            name: value
            for name, value in own.items()
            if inspect.getattr_static(generated, name, None) is not value and _is_replaced(base, name, value, functions)
        }
        seen |= own.keys()
    return found


def replaced_since_apply(model: Any) -> list[str]:
    """A text on each class of which methods were replaced after `opslot.apply` moved the instances in
    `model`, which run the former methods; `apply` moves them again."""
    found: dict[str, None] = {}
    for cls in dict.fromkeys(type(module) for module in model.modules()):
        for base in cls.__mro__:
            original = original_of(base)
            if original is None:
                continue
            below = cls.__mro__[: cls.__mro__.index(original)] if original in cls.__mro__ else cls.__mro__
            for name, value in replaced_methods(original, base).items():
                if all(vars(each).get(name) is not value for each in below):
                    found[
                        f"{original.__name__}.{name}, or a function that it calls, was replaced after opslot.apply, "
                        "and the model runs the former one; call opslot.apply again to run the new one"
                    ] = None
    return list(found)


def replaced_on_generated(cls: Any, name: str) -> Any:
    """What replaced a method of a generated class itself, as an assignment to `type(module).forward` does, or None."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    original = None if owner is None else original_of(owner)
    if owner is None or original is None:
        return None
    value = vars(owner)[name]
    # A class with replaced methods of Transformers' class has these.
    if value is vars(original).get(name):
        return None
    # Its methods may be functions of the module under other names.
    return value if _code_in(value, sys.modules[owner.__module__]) is None else None


def reads_documents(method: Any) -> bool:
    """Whether a method of a generated class makes masks or reads the boundaries of packed documents."""
    code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
    return code is not None and any(_DOCUMENTS.search(name) for name in _names_in(code))


def _is_replaced(cls: Any, name: str, value: Any, functions: set[str]) -> bool:
    function = getattr(value, "fget", getattr(value, "__func__", value))
    if not isinstance(function, FunctionType):
        return False
    code = _code_in(function, sys.modules[cls.__module__], f"{cls.__qualname__}.{name}")
    if code is not None:
        return bool(functions.intersection(_names_in(code)))
    # What decorators and metaclasses add has no code in the module.
    is_special = name.startswith("__") and name.endswith("__")
    return not is_special or _owner(function) not in _WRAPPERS


def _code_in(function: Any, module: ModuleType, name: str = "") -> Any:
    """The code that a function of a module runs, in decorators of known packages or not; None if it may run another.

    Args:
        name: the function's qualified name; "" for any.
    """
    while isinstance(function, FunctionType):
        code = function.__code__
        if code.co_filename == module.__file__ and name in ("", code.co_qualname):
            return code
        if _owner(function) not in _WRAPPERS or "<locals>" not in code.co_qualname:
            return None
        if "__wrapped__" not in vars(function):
            # A decorator without a reference to what it wraps.
            return code
        function = vars(function)["__wrapped__"]
    return None


def _replaced_functions(module: ModuleType, generated: ModuleType) -> set[str]:
    """Names of functions that a module's own text would not give it, and of its functions that call them."""
    found, calls = set[str](), dict[str, set[str]]()
    for name, value in vars(module).items():
        known: Any = vars(generated).get(name)
        if not isinstance(value, FunctionType) or value is known or (known is None and not _defines(module, name)):
            continue
        code = _code_in(value, module, name)
        defined = isinstance(known, FunctionType) and known.__module__ == generated.__name__
        # An alias of a method is of another name.
        defined = defined and known.__qualname__ == name
        if code is None and (defined or _owner(value) not in _WRAPPERS):
            found.add(name)
        elif code is not None:
            calls[name] = set(_names_in(code))
    before = -1
    while len(found) != before:
        before = len(found)
        found |= {name for name, called in calls.items() if called & found}
    return found


def _defines(module: ModuleType, name: str) -> bool:
    """Whether the text of a module defines a function, which it otherwise imports from another package."""
    try:
        return name in _functions_in(inspect.getsource(module))
    except (OSError, SyntaxError):
        return True


@lru_cache(maxsize=16)
def _functions_in(text: str) -> frozenset[str]:
    return frozenset(node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))


def _owner(function: FunctionType) -> str:
    """The package whose module defines a function."""
    return str(function.__globals__.get("__name__", "")).partition(".")[0]


def _names_in(code: Any) -> Iterator[str]:
    """Global names and attributes that code reads, also in functions inside."""
    yield from code.co_names
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            yield from _names_in(constant)
