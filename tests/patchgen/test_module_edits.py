"""Replacements, imports, exclusions and the header: text before and after."""

from __future__ import annotations

import textwrap

import pytest

from opslot.patchgen import PatchConfig, PatchError, Slot, create_patch_from_external
from opslot.patchgen.engine import generate
from tests.patchgen.text import USES_ACT, lines

BEFORE = """
    # Licence of upstream.
    import os
    from ...activations import ACT, SILU
    from .configuration_toy import ToyConfig

    __all__ = ["ToyNorm", "ToyModel"]


    def norm(x):
        return x


    # about the norm
    @hub("norm")
    class ToyNorm(Module):
        def forward(self, x):
            return norm(x)


    class ToyModel(Base):
        def __init__(self, config):
            '''Builds.'''
            super().__init__(config)
            self.norm = ToyNorm()
            self.post_init()

        @can_return_tuple
        def forward(self, x: ToyConfig):
            return self.norm(x)
"""


def test_replace_class_by_decorator(rewrite, patch):
    # --- the comment above travels along ---
    @patch.replace_class("ToyNorm", description="our norm")
    class OurNorm:
        def forward(self, x):
            return x  # ours

    text = rewrite(BEFORE, patch)
    assert (
        lines(
            """
        # about the norm
        # --- the comment above travels along ---
        # [PATCHED: our norm (Patch.1)]
        class ToyNorm:
            def forward(self, x):
                return x  # ours


        class ToyModel(Base):
        """
        )
        in text
    )
    assert "replace_class" not in text
    assert OurNorm().forward(3) == 3


def test_replace_function_by_call_and_name_map(rewrite, patch):
    text = "def helper(x: 'OldThing') -> OldThing:\n    return OldThing(x, OldThingExtra)\n"
    patch.replace_function("norm", replacement=text, name_map={"Old": "OldNew"})
    assert lines(
        """
        # [PATCHED: replace function norm (Patch.1)]
        def norm(x: 'OldNewThing') -> OldNewThing:
            return OldNewThing(x, OldNewThingExtra)
        """
    ) in rewrite(BEFORE, patch)


def test_name_map_leaves_mapped_names_alone(rewrite, patch):
    patch.replace_function("norm", "def f(x):\n    return Toy(ToyMoe(x))\n", name_map={"Toy": "ToyMoe"})
    assert "return ToyMoe(ToyMoe(x))" in rewrite(BEFORE, patch)


def test_override_method_keeps_upstream_decorators(rewrite, patch):
    patch.override_method("ToyModel.forward", "def f(self, x, y=None):\n    return x\n", description="takes y")
    assert rewrite(BEFORE, patch).endswith(
        textwrap.indent(
            lines(
                """
                # [PATCHED: takes y (Patch.1)]
                @can_return_tuple
                def forward(self, x, y=None):
                    return x
                """
            ),
            "    ",
        )
    )


def test_override_method_adds_a_missing_one(rewrite, patch):
    @patch.override_method("ToyModel.get_parallel_plan")
    def get_parallel_plan(self):
        return None

    assert rewrite(BEFORE, patch).endswith(
        textwrap.indent(
            lines(
                """
                    return self.norm(x)

                # [PATCHED: add method ToyModel.get_parallel_plan (Patch.1)]
                def get_parallel_plan(self):
                    return None
                """
            ),
            "    ",
        )
    )


def test_override_method_warns_of_a_misspelled_name(rewrite, patch, caplog):
    patch.override_method("ToyModel.foward", "def f(self, x):\n    return x\n", description="returns x")
    assert "# [PATCHED: returns x (Patch.1)]" in rewrite(BEFORE, patch)
    assert "class ToyModel has no method 'foward', so it was added; did you mean 'forward'?" in caplog.text


def test_modify_init_goes_before_post_init(rewrite, patch):
    patch.modify_init("ToyModel", "def f(self, config):\n    self.extra = config.extra\n")
    assert lines(
        """
        # [PATCHED: extend ToyModel.__init__]
        def __init__(self, config):
            '''Builds.'''
            super().__init__(config)
            self.norm = ToyNorm()
            # --- Patch.1 ---
            self.extra = config.extra
            # --- Patch.1 ---
            self.post_init()
        """
    ) in textwrap.dedent(rewrite(BEFORE, patch).split("class ToyModel(Base):\n")[1])


def test_modify_init_around_original_init(rewrite, patch):
    @patch.modify_init("ToyModel")
    def init(original_init, self, config):
        config.seen = True
        original_init(self, config)
        self.extra = 1

    expected = lines(
        """
            '''Builds.'''
            # --- Patch.1 ---
            config.seen = True
            # --- Patch.1 ---
            super().__init__(config)
            self.norm = ToyNorm()
            self.post_init()
            # --- Patch.1 ---
            self.extra = 1
            # --- Patch.1 ---
        """
    )
    assert textwrap.indent(expected, " " * 8) in rewrite(BEFORE, patch)


def test_external_replacement(rewrite, patch):
    patch.edits.append(create_patch_from_external("ToyNorm", "kernels.norm", "FastNorm"))
    text = rewrite(BEFORE, patch)
    assert "from kernels.norm import FastNorm as ToyNorm  # noqa: E402\n" in text
    assert "class ToyNorm" not in text


def test_imports_blocks_and_helpers(rewrite, patch):
    patch.add_import("numpy", alias="np")
    patch.add_import("functools", names=["lru_cache"])
    patch.drop_import_names("SILU", "os")
    patch.add_post_import_block(
        """
        try:
            import fast
        except ImportError:
            fast = None
        """
    )

    @patch.add_helper
    def half(x):
        # halves
        return x / 2

    assert rewrite(BEFORE, patch).startswith(
        lines(
            """
            from transformers.activations import ACT
            from transformers.models.toy.configuration_toy import ToyConfig
            # [PATCHED: imports of the patches]
            import numpy as np
            from functools import lru_cache


            # [PATCHED: added]
            try:
                import fast
            except ImportError:
                fast = None


            # [PATCHED: added]
            def half(x):
                # halves
                return x / 2

            __all__ =
            """
        ).rstrip("\n")
    )
    assert half(4) == 2


def test_final_block(rewrite, patch):
    patch.add_final_block("print(1)\n")
    assert rewrite(BEFORE, patch).endswith("return self.norm(x)\n\n\n# [PATCHED: added]\nprint(1)\n")


def test_dropping_a_missing_import_raises(rewrite, patch):
    patch.drop_import_names("ACT", "GELU")
    with pytest.raises(PatchError, match="imports no GELU"):
        rewrite(BEFORE, patch)


def test_dropping_an_import_that_is_still_used_raises(rewrite, patch):
    patch.drop_import_names("ACT")
    with pytest.raises(PatchError, match=r"still uses ACT\n  found: ACT in ToyNorm\n  hint: replace or exclude"):
        rewrite(USES_ACT, patch)
    patch.add_post_import_block("try:\n    from fast import ACT\nexcept ImportError:\n    ACT = None")
    assert "    ACT = None\n" in rewrite(USES_ACT, patch)


def test_nested_relative_imports_become_absolute(rewrite, patch):
    text = rewrite("def f():\n    from .. import auto\n    from . import x\n    return auto, x\n", patch)
    assert "from transformers.models import auto\n" in text
    assert "from transformers.models.toy import x\n" in text


def test_header_lists_every_patch_under_the_licence(make_release, patch):
    patch.slot_method("ToyNorm.forward", Slot("rms_norm"), args="x")
    patch.add_import("numpy", alias="np")
    patch.drop_import_names("os")
    text = generate(patch, make_release(BEFORE))
    assert text.startswith(
        lines(
            '''
            # Licence of upstream.
            # Generated from transformers.models.toy.modeling_toy of transformers 9.0.0 by opslot patchgen; do not edit.
            # Upstream's licence, above, holds. Changes made to upstream's text:
            #   Patch.1: slot rms_norm/standard in front of ToyNorm.forward
            #   import: import numpy as np
            #   import dropped: os
            """Upstream's modeling code with slots for kernels; generated from transformers 9.0.0, do not edit."""
            '''
        )
    )


def test_output_is_deterministic(make_release):
    def patch() -> PatchConfig:
        config = PatchConfig("transformers.models.toy.modeling_toy")
        config.slot_method("ToyNorm.forward", Slot("rms_norm"), args="x")
        config.override_method("ToyModel.forward", "def f(self, x):\n    return x\n")
        return config

    first, second = (generate(patch(), make_release(BEFORE)) for _ in range(2))
    assert first == second
    assert patch().digest == patch().digest


def test_without_edits_only_header_and_imports_differ(rewrite, patch):
    after = rewrite(BEFORE, patch)
    before = textwrap.dedent(BEFORE).strip("\n").split("\n", 1)[1] + "\n"
    assert after == before.replace("from ...", "from transformers.").replace(
        "from .configuration", "from transformers.models.toy.configuration"
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("replace_class", "ToyNorm"), ("override_method", "ToyNorm.forward")),
        (("override_method", "ToyModel.forward"), ("override_method", "ToyModel.forward")),
    ],
)
def test_conflicts_name_both(rewrite, patch, first, second):
    for (kind, target), note in ((first, "one"), (second, "two")):
        text = "class A: ...\n" if kind == "replace_class" else "def f(self): ...\n"
        getattr(patch, kind)(target, text, description=note)
    with pytest.raises(PatchError, match=r"`one` \(.*\) and `two` \(.*\)"):
        rewrite(BEFORE, patch)


def test_extending_a_sibling_with_other_names(rewrite, patch):
    sibling = PatchConfig(patch.source_module)
    sibling.slot_expr("ToyMLP.forward", Slot("swiglu_mlp"), "self.act(ToyGate($x)) * $y", args="$x, $y")
    sibling.set_attribute("ToyMLP", "kind", "ToyMLP")
    sibling.add_final_block("ToyMLP.ready = True")
    patch.extend(sibling, name_map={"Toy": "ToyMoe"})
    source = """
        class ToyMoeMLP:
            def forward(self, x):
                return self.act(ToyMoeGate(x)) * self.up(x)
        """
    text = rewrite(source, patch)
    assert "self._opslot_swiglu_mlp(x, self.up(x))" in text
    assert "kind = 'ToyMoeMLP'" in text
    assert text.endswith("ToyMoeMLP.ready = True\n")


def test_slot_edits_with_other_names(rewrite, patch):
    sibling = PatchConfig(patch.source_module)
    sibling.slot_method("ToyNorm.forward", Slot("rms_norm"), args="x, self.weight")
    sibling.slot_calls("toy_rotary", Slot("rotary_pos_emb", "full"))
    patch.extend(sibling, name_map={"Toy": "ToyMoe", "toy": "moe"})
    source = """
        def moe_rotary(q):
            return q

        class ToyMoeNorm:
            def forward(self, x):
                return self.weight * moe_rotary(x)
        """
    text = rewrite(source, patch)
    assert "self._opslot_rms_norm(x, self.weight)" in text
    assert "(self._opslot_rotary_pos_emb or moe_rotary)(x)" in text


def test_extending_a_sibling(rewrite, patch):
    sibling = PatchConfig("transformers.models.toy.modeling_toy")
    sibling.add_import("numpy", alias="np")
    sibling.add_post_import_block("A = 1")
    sibling.slot_method("ToyNorm.forward", Slot("rms_norm"), args="x")
    patch.extend(sibling)
    patch.helpers.extend(sibling.helpers)
    text = rewrite(BEFORE, patch)
    assert "import numpy as np" in text
    assert "A = 1" in text
    assert "_opslot_rms_norm" in text


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda patch: patch.add_import("numpy", names=["x"], is_from_import=False), "a from-import needs names"),
        (lambda patch: patch.replace_class("A", 3), "cannot be read"),
        (lambda patch: patch.replace_function("norm", lambda x: x), "is a lambda"),
        (lambda patch: PatchConfig("toy"), "dotted module name"),
        (lambda patch: patch.add_import("a b"), "add_import: the text is not Python code"),
        (lambda patch: patch.add_post_import_block("def f(:"), "add_post_import_block: the text is not Python code"),
        (lambda patch: patch.add_final_block("# only a comment"), "add_final_block: the text has no statement"),
        (lambda patch: patch.add_helper("x ="), "add_helper: the text is not Python code"),
        (lambda patch: patch.set_attribute("ToyNorm", "eps", object()), "a name and a literal value"),
        (lambda patch: patch.set_attribute("ToyNorm", "a b", 1), "a name and a literal value"),
    ],
)
def test_invalid_usage_raises(patch, call, problem):
    with pytest.raises(PatchError, match=problem):
        call(patch)


def test_replacement_must_be_one_definition(rewrite, patch):
    patch.replace_function("norm", "def a(): ...\n\ndef b(): ...\n")
    with pytest.raises(PatchError, match=r"not one class or function\n  found: 2"):
        rewrite(BEFORE, patch)


@pytest.mark.parametrize(
    "edit",
    [
        lambda patch: patch.set_attribute("ToyGone", "eps", 1),
        lambda patch: patch.decorate("ToyGone.forward", "os", "f"),
        lambda patch: patch.decorate("ToyNorm.gone", "os", "f"),
    ],
)
def test_attribute_or_decorator_of_a_missing_symbol_raises(rewrite, patch, edit):
    edit(patch)
    with pytest.raises(PatchError, match=r"it has no Toy(Gone|Norm\.gone)"):
        rewrite(BEFORE, patch)


@pytest.mark.parametrize(
    "edit",
    [
        lambda patch: patch.override_method("ToyNorm.forward", "def forward(self, x: return x"),
        lambda patch: patch.insert_before("ToyNorm.forward", "return norm(x)", "x = = 1"),
        lambda patch: patch.slot_method("ToyNorm.forward", Slot("rms_norm", "standard"), args="self, x(("),
    ],
)
def test_invalid_syntax_is_reported_with_the_edit(rewrite, patch, edit):
    edit(patch)
    with pytest.raises(PatchError, match=r"ToyNorm\.forward\n(.|\n)*its text is not Python code"):
        rewrite(BEFORE, patch)


def test_unknown_upstream_module_raises(make_release):
    with pytest.raises(PatchError, match=r"has no module transformers\.models\.other\.modeling_other"):
        generate(PatchConfig("transformers.models.other.modeling_other"), make_release(BEFORE))
