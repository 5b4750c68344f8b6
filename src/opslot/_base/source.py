"""The source of a module class, for properties that only its code shows."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any


def forward_source(cls: Any) -> str:
    """The source of a class's forward, without indentation; "" where there is none, as for code typed in a prompt."""
    try:
        return textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward)))
    except (OSError, TypeError):
        return ""
