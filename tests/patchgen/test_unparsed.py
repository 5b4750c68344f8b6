"""Definitions that no edit needs stay text; the module is the one that LibCST parses."""

from __future__ import annotations

import libcst as cst

from opslot.patchgen import PatchConfig
from opslot.patchgen.edited_module import EditedModule
from opslot.patchgen.engine import generate
from opslot.patchgen.unparsed import Unparsed

SOURCE = '''
    # Licence of upstream.
    """A module."""
    import os
    from ..shared import scale; LIMIT = 3


    # about the norm
    @decorated
    # between decorator and function
    def norm(x):
        """Text with
class Inside: in a string."""
        return x
        # a comment at the end of the body

    # a comment of the body below a blank line

# about the model
    class Model: pass


    class Model(Base):
        def forward(self, x):
            from .other import late

            return late(norm(x))


    if LIMIT:
        def other(): return 1

    __all__ = ["Model"]
'''


def source() -> str:
    return "\n".join(line.removeprefix("    ") for line in SOURCE.strip("\n").splitlines())


def test_parsed_later_equals_parsed_at_once(make_release, patch: PatchConfig):
    edited = EditedModule(patch, make_release(source()))
    text = edited.upstream.text
    assert [node.name for node in edited.module.body if isinstance(node, Unparsed)] == ["norm", "Model", "Model"]
    assert edited.module.code == text
    edited.parse()
    assert edited.module.deep_equals(cst.parse_module(text))
    assert edited.module.code == text


def test_only_edited_definitions_are_parsed(make_release, patch: PatchConfig):
    patch.set_attribute("Model", "flag", True)
    edited = EditedModule(patch, make_release(source()))
    edited.set_attribute(patch.edits[0])
    edited.write_slot_declarations()
    kinds = {
        node.name if isinstance(node, Unparsed) else node.name.value: type(node)
        for node in edited.module.body
        if isinstance(node, Unparsed | cst.FunctionDef | cst.ClassDef)
    }
    assert kinds == {"norm": Unparsed, "Model": cst.ClassDef}


def test_import_inside_a_definition_becomes_absolute(make_release, patch: PatchConfig):
    text = generate(patch, make_release(source()))
    assert "from transformers.models.toy.other import late" in text
