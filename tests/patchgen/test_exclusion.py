"""Symbols that a patch excludes, with all that only they used."""

from __future__ import annotations

import textwrap

import pytest

from opslot.patchgen import PatchConfig, PatchError
from opslot.patchgen.engine import generate
from tests.patchgen.text import lines

EXCLUDE = """
    __all__ = ["Talker", "Thinker"]


    def snake(x):
        return x


    def shared(x):
        return x


    class Talker(Module):
        def forward(self, x):
            return snake(shared(x))


    class Thinker(Module):
        def forward(self, x):
            return shared(x)

        def init(self, module):
            if isinstance(module, Talker):
                a(module)
            elif isinstance(module, (Thinker, Talker)):
                b(module)
            else:
                c(module)
"""


def test_exclude_removes_all_entries_branches_and_dead_helpers(rewrite, patch):
    patch.exclude_from_output("Talker")
    assert rewrite(EXCLUDE, patch) == lines(
        """
        __all__ = ["Thinker"]


        def shared(x):
            return x


        class Thinker(Module):
            def forward(self, x):
                return shared(x)

            def init(self, module):
                if isinstance(module, Thinker):
                    b(module)
                else:
                    c(module)
        """
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("if isinstance(m, Talker):\n    a()\n", "pass\n"),
        ("if isinstance(m, Talker):\n    a()\nelse:\n    b()\n    c()\n", "b()\nc()\n"),
        ("if isinstance(m, X):\n    x()\nelif isinstance(m, Talker):\n    a()\n", "if isinstance(m, X):\n    x()\n"),
        (
            "if isinstance(m, X):\n    x()\nelif isinstance(m, Talker):\n    a()\nelse:\n    b()\n",
            "if isinstance(m, X):\n    x()\nelse:\n    b()\n",
        ),
    ],
)
def test_excluded_isinstance_branches(rewrite, patch, before, after):
    patch.exclude_from_output("Talker")
    source = "class Talker: ...\n\n\ndef init(m):\n" + textwrap.indent(before, "    ")
    assert rewrite(source, patch) == "def init(m):\n" + textwrap.indent(after, "    ")


def test_exported_helpers_are_kept(rewrite, patch):
    patch.exclude_from_output("Talker")
    text = rewrite(EXCLUDE.replace('["Talker", "Thinker"]', '["Talker", "Thinker", "snake"]'), patch)
    assert '__all__ = ["Thinker", "snake"]' in text
    assert "def snake(x):" in text


def test_excluding_a_used_symbol_raises(rewrite, patch):
    patch.exclude_from_output("shared")
    with pytest.raises(PatchError, match="shared is still used by Talker, Thinker"):
        rewrite(EXCLUDE, patch)


def test_excluding_a_set_that_uses_each_other(rewrite, patch):
    """Excluded separately, each would still be used by the other."""
    source = """
        class Talker:
            def make(self):
                return Vocoder()

        class Vocoder:
            def owner(self):
                return Talker

        class Thinker:
            pass
        """
    patch.exclude_from_output("Talker", "Vocoder")
    assert rewrite(source, patch) == "class Thinker:\n            pass\n".replace("            ", "    ")


def test_exclusions_are_applied_together_after_other_edits(rewrite, patch):
    source = """
        class Talker:
            def make(self):
                return Vocoder()

        class Vocoder:
            def owner(self):
                return Talker

        class Omni:
            def talk(self):
                return Talker()
        """
    patch.exclude_from_output("Talker")
    patch.exclude_from_output("Vocoder")
    patch.set_attribute("Vocoder", "rate", 1)
    patch.override_method("Omni.talk", "def talk(self):\n    raise NotImplementedError\n", description="no talker")
    assert rewrite(source, patch) == lines(
        """
        class Omni:
            # [PATCHED: no talker (Patch.4)]
            def talk(self):
                raise NotImplementedError
        """
    )


def test_excluding_a_set_names_the_remaining_user(make_release, patch):
    source = """
        class Talker: ...

        class Vocoder: ...

        class Omni:
            part = Vocoder
        """
    patch.exclude_from_output("Talker", "Vocoder")
    with pytest.raises(PatchError, match="Vocoder is still used by Omni"):
        generate(patch, make_release(source))


def test_arguments_of_a_patch_that_cannot_be_raise():
    with pytest.raises(PatchError, match="needs at least one name"):
        PatchConfig("some.module").exclude_from_output()
    for name in ("../../x.py", "/x.py", "x.txt", ".."):
        with pytest.raises(PatchError, match="is not the name of a Python file"):
            PatchConfig("some.module", target_file=name)
