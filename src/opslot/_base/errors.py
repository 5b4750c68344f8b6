"""Errors for users: what is wrong, what was found, and a hint."""

from __future__ import annotations

import re
from collections.abc import Sequence


class OpslotError(Exception):
    """Base of every error that opslot raises on purpose; the command line prints it without a traceback.

    Args:
        what: what is wrong, naming the user's own value.
        found: what was found instead.
        hint: how to fix it.

    Attributes:
        problem: the text without the hint, for an error that lists several.
        hint: how to fix it; may be empty.
    """

    def __init__(self, what: str, *, found: str = "", hint: str = "") -> None:
        super().__init__(error_text(what, found=found, hint=hint))
        self.problem = error_text(what, found=found)
        self.hint = hint


class ConfigError(OpslotError, ValueError):
    """A configuration names something that does not exist or cannot work here."""


class KernelError(OpslotError, RuntimeError):
    """A kernel cannot be loaded, bound or called with these arguments."""


class PatchError(OpslotError, RuntimeError):
    """A patch does not apply to the Transformers source."""


class CheckpointError(OpslotError, RuntimeError):
    """A checkpoint is missing, corrupt or does not fit the model."""


class DataError(OpslotError, ValueError):
    """Training data is missing, empty or malformed."""


class ParallelError(OpslotError, RuntimeError):
    """Parallel state is missing or inconsistent, or another rank failed."""


class OtherRankFailed(ParallelError):
    """This rank failed because of another one, which reports the error."""


class TrainingError(OpslotError, RuntimeError):
    """A run cannot continue: its loss or gradients are not finite, or its files cannot be written."""


def error_text(what: str, *, found: str = "", hint: str = "") -> str:
    """What is wrong, what was found and what to do about it, each on a separate line."""
    lines = [what, *([f"  found: {found}"] if found else []), *([f"  hint: {hint}"] if hint else [])]
    return "\n".join(lines)


_JSON_TYPES = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def json_type(value: object) -> str:
    """What a value read from a file is, in the words of JSON; else its Python type."""
    return _JSON_TYPES.get(type(value), f"a value of type {type(value).__name__}")


def list_problems(title: str, problems: Sequence[str], shown: int = 10) -> str:
    """`title`, then one line per problem; a long list is cut and counted."""
    lines = [f"- {problem}" for problem in problems[:shown]]
    if len(problems) > shown:
        lines.append(f"- and {len(problems) - shown} more")
    return f"{title}:\n" + "\n".join(lines)


def count_of(problems: Sequence[str]) -> str:
    """E.g. "1 problem" or "3 problems"."""
    return "1 problem" if len(problems) == 1 else f"{len(problems)} problems"


# What installs a package may have another name than the library (pillow and PIL), so it comes first.
_PACKAGE = (r"pip install (?:-\S+ )*([\w.-]+)", r"requires the ([\w.-]+) library")


def missing_package(error: Exception) -> str:
    """The package that an ImportError names; "" for any other error."""
    if not isinstance(error, ImportError):
        return ""
    for pattern in _PACKAGE:
        if found := re.search(pattern, str(error)):
            return found[1].rstrip(".")
    return (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
