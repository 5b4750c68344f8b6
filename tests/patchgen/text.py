"""Source text of toy modules."""

from __future__ import annotations

import textwrap


def lines(text: str) -> str:
    return textwrap.dedent(text).strip("\n") + "\n"


USES_ACT = """
    from ...activations import ACT

    class ToyNorm:
        def forward(self, x):
            return [ACT(y) for y in x]
"""
