"""A faster Triton interpreter: work that it repeats at every call, most of a kernel's time on a CPU, is cached."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
from types import FunctionType, ModuleType
from typing import Any


def speed_up() -> None:
    """Patch the interpreter of this process; kernels compute the same values as before.

    - At every call of a function, the interpreter searches the language for builtins and replaces them, even where one
      kernel calls another and they are already replaced.
    - It builds a table of all dtypes for each lookup of one.
    - It repeats integer arithmetic to detect overflow, and ignores the result unless in debug mode.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    if getattr(interpreter, "_opslot_fast", False):
        return
    interpreter._opslot_fast = True
    _replace_builtins_once(interpreter)
    interpreter._get_np_dtype = _cached(interpreter._get_np_dtype, interpreter.tl)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _replace_builtins_once(interpreter: ModuleType) -> None:
    is_builtin = interpreter.tl.core.is_builtin
    patch_lang = interpreter._patch_lang

    @functools.cache
    def names(language: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(language) if is_builtin(member)]

    @functools.cache
    def languages(function: FunctionType) -> list[ModuleType]:
        known = (interpreter.tl, interpreter.tl.core)
        return [value for value in function.__globals__.values() if any(value is language for language in known)]

    def patch_builtin(language: Any, *rest: Any) -> None:
        for name in names(language):
            if is_builtin(member := getattr(language, name)):
                interpreter._patch_attr(language, name, member, *rest)

    def patch_once(function: FunctionType) -> Any:
        if any(is_builtin(language.load) for language in languages(function)):
            return patch_lang(function)
        # The caller that replaced them restores them.
        return interpreter._LangPatchScope() if hasattr(interpreter, "_LangPatchScope") else None

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_once


def _cached(get_np_dtype: Any, tl: ModuleType) -> Any:
    scalars = functools.cache(get_np_dtype)

    def cached(language_type: Any) -> Any:
        if isinstance(language_type, tl.block_type):
            language_type = language_type.element_ty
        # Pointers have no hash.
        return get_np_dtype(language_type) if isinstance(language_type, tl.pointer_type) else scalars(language_type)

    return cached
