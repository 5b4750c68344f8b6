"""Fingerprints depend on what code computes, not on names or formatting."""

from __future__ import annotations

import pytest

from opslot.patchgen.fingerprint import fingerprint

BODY = "def norm(self, x, eps=1e-6):\n    y = x.float()\n    return self.weight * (y + eps)\n"


@pytest.mark.parametrize(
    "same",
    [
        "def other(self, x, eps=1e-6):\n    y = x.float()\n    return self.weight * (y + eps)\n",
        "def norm(self, hidden, epsilon=1e-6):\n    z = hidden.float()\n    return self.weight * (z + epsilon)\n",
        (
            "@hub('n')\ndef norm(self, x: Tensor, eps: float = 1e-6) -> Tensor:\n    '''Doc.'''\n    # why\n"
            "    y: Tensor = x.float()\n    return self.weight * (y + eps)\n"
        ),
        "    def norm(self, x, eps=1e-6):\n        y = x.float()\n        return self.weight * (y + eps)\n",
    ],
)
def test_names_annotations_docs_and_decorators_are_ignored(same):
    assert fingerprint(same) == fingerprint(BODY)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("y + eps", "y - eps"),
        ("1e-6", "1e-5"),
        ("self.weight", "self.scale"),
        ("x.float()", "x.double()"),
        ("self.weight * (y + eps)", "(y + eps) * self.weight"),
        ("self, x, eps", "self, eps, x"),
    ],
)
def test_changed_meaning_differs(old, new):
    changed = (
        BODY.replace(old, new) if old != "self, x, eps" else BODY.replace("(self, x, eps=1e-6)", "(self, eps, x=1e-6)")
    )
    assert fingerprint(changed) != fingerprint(BODY)


def test_swapped_locals_differ():
    first = "def f(a, b):\n    return a - b\n"
    assert fingerprint(first) == fingerprint("def f(c, d):\n    return c - d\n")
    assert fingerprint(first) != fingerprint("def f(c, d):\n    return d - c\n")
