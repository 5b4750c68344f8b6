"""A patch written as a patch file."""

from __future__ import annotations

from opslot.patchgen import Slot, create_patch_from_external
from opslot.patchgen.edits import Edit
from opslot.patchgen.writing import patch_source

_PARTS = ("additional_imports", "post_import_blocks", "final_blocks", "helpers", "dropped_imports", "dependencies")


def test_every_edit_is_written_with_its_options(patch):
    norm, loss = Slot("rms_norm", "weight_offset", name="norm"), Slot("cross_entropy_loss", "sequence_classification")
    patch.slot_method(
        "A.forward",
        norm,
        args="x",
        returns="{call} + 1",
        expects=("1", "2"),
        outside_decorators=True,
        parameters=("x",),
    )
    patch.slot_calls("f", norm, expects={"f": "1", "g": ("2", "3")}, count=2)
    patch.slot_expr("A.forward", norm, "$x * 2", args="$x", count=3)
    patch.slot_loss("A.forward", Slot("cross_entropy_loss", "causal"))
    patch.slot_loss("AForSequenceClassification.forward", loss)
    patch.replace("A.forward", ["x = 1\ny = 2", "x"], "z", count=2, slot=norm, note="why")
    patch.insert_before("A.forward", "x", "y = 1")
    patch.insert_after("A.forward", "x", "y = 1\nz = 2")
    patch.inherit_method("A.__init__", "transformers.modeling_layers", "B.__init__")
    patch.copy_undecorated("f", "g")
    patch.exclude_from_output("B", "C")
    patch.slot_config(["A"], norm, depends=("f",))
    patch.set_attribute("A", "_opslot_x", (("a", 1),))
    patch.decorate("A.forward", "package", "decorator")
    patch.take_keywords("A.forward")
    patch.replace_class("D", "class D:\n    pass\n", name_map={"E": "D"}, description="why")
    patch.replace_function("h", "def h(): ...")
    patch.override_method("A.m", "def m(self): ...")
    patch.modify_init("F", "def __init__(self):\n    self.x = 1\n")
    patch.edits.append(create_patch_from_external("G", "package", "H"))
    patch.add_import("package", ["name"])
    patch.add_import("package", alias="p")
    patch.drop_import_names("name")
    patch.add_post_import_block("x = 1\ny = 2")
    patch.add_helper("\ndef helper():\n    return '\\n'\n")
    patch.add_final_block("z = 3")
    patch.depends_on("transformers.modeling_layers", "B")
    namespace = {}
    exec(patch_source(patch), namespace)
    written = namespace["patch"]
    assert written.edits == patch.edits
    for part in _PARTS:
        assert getattr(written, part) == getattr(patch, part)
    assert {type(edit) for edit in patch.edits} == set(Edit.__subclasses__())
