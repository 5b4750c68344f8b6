"""Lets methods of a generated module read and assign the globals of the module that they are from."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType


def make_classes(make: Callable[[ModuleType], dict[str, type]], original: ModuleType, module: str) -> dict[str, type]:
    """Call a function that defines classes, as if it was one of `original`, whose names stay as they are.

    Args:
        make: a function of a generated module, without free variables.
        original: what it is called with.
        module: name of the generated module, which the classes get.
    """
    assert isinstance(make, FunctionType)
    code = _renamed(make.__code__, f"{make.__qualname__}.<locals>.")
    classes: dict[str, type] = FunctionType(code, vars(original))(original)
    for cls in classes.values():
        cls.__module__ = module
    return classes


def _renamed(code: CodeType, prefix: str) -> CodeType:
    """The code with the qualified names that its classes and methods have at the top level of a module."""

    def renamed(constant: object) -> object:
        if isinstance(constant, CodeType):
            return _renamed(constant, prefix)
        return constant.removeprefix(prefix) if isinstance(constant, str) else constant

    constants = tuple(map(renamed, code.co_consts))
    return code.replace(co_consts=constants, co_qualname=code.co_qualname.removeprefix(prefix))
