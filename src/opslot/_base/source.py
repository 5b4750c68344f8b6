"""The source and the parameters of functions and classes, for properties that only their code shows."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=256)
def source_of(definition: Any) -> str:
    """The source of a function or class, without indentation; "" where there is none, as for code typed in a prompt."""
    try:
        return textwrap.dedent(inspect.getsource(definition))
    except (OSError, TypeError):
        return ""


def forward_source(cls: Any) -> str:
    """The source of a class's forward; "" where there is none."""
    return source_of(inspect.unwrap(cls.forward))


def method_parameters(cls: Any, method: str = "forward") -> Mapping[str, inspect.Parameter]:
    """The parameters of a class's method by name, in order, without self. torch.compile can trace it."""
    first, *others = inspect.signature(getattr(cls, method)).parameters.values()
    own = [first, *others] if first.kind is first.VAR_POSITIONAL else others
    return {parameter.name: parameter for parameter in own}


def takes_text_axis(cls: Any) -> bool:
    """Whether a model with several axes of positions takes those of the text as a row before them: [4, B, S]."""
    return "shape[0] == 4" in forward_source(cls)
