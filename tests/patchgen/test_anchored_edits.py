"""Edits by anchor: text before and after."""

from __future__ import annotations

import pytest

from opslot.patchgen import PatchConfig, PatchError, Slot
from tests.patchgen.text import lines

LAYER = """
    class Layer(Module):
        def forward(self, x, y):
            # keep me
            z = self.act(self.gate(x)) * self.up(x)  # and me
            if y:
                z = drop(z, p=0.5, training=self.training)
            return z
"""


def test_replace_expression_keeps_layout_and_comments(rewrite, patch):
    patch.replace("Layer.forward", "self.act($gate) * $up", "fused($gate, $up)")
    assert rewrite(LAYER, patch) == lines(
        """
        class Layer(Module):
            # [PATCHED: replace `self.act($gate) * $up` in Layer.forward]
            def forward(self, x, y):
                # keep me
                # --- Patch.1 ---
                z = fused(self.gate(x), self.up(x))  # and me
                # --- Patch.1 ---
                if y:
                    z = drop(z, p=0.5, training=self.training)
                return z
        """
    )


def test_replace_statement_in_a_nested_block(rewrite, patch):
    patch.replace("Layer.forward", "z = drop(z, $*rest)", "z = twice(z)\nz = drop(z, $*rest)")
    assert rewrite(LAYER, patch) == lines(
        """
        class Layer(Module):
            # [PATCHED: replace `z = drop(z, $*rest)` in Layer.forward]
            def forward(self, x, y):
                # keep me
                z = self.act(self.gate(x)) * self.up(x)  # and me
                if y:
                    # --- Patch.1 ---
                    z = twice(z)
                    z = drop(z, p=0.5, training=self.training)
                    # --- Patch.1 ---
                return z
        """
    )


def test_insert_before_and_after(rewrite, patch):
    patch.insert_before("Layer.forward", "return z", "check(z)")
    patch.insert_after("Layer.forward", "self.gate(x)", "trace(z)")
    assert rewrite(LAYER, patch) == lines(
        """
        class Layer(Module):
            # [PATCHED: insert before `return z` in Layer.forward]
            # [PATCHED: insert after `self.gate(x)` in Layer.forward]
            def forward(self, x, y):
                # keep me
                z = self.act(self.gate(x)) * self.up(x)  # and me
                # --- Patch.2 ---
                trace(z)
                # --- Patch.2 ---
                if y:
                    z = drop(z, p=0.5, training=self.training)
                # --- Patch.1 ---
                check(z)
                # --- Patch.1 ---
                return z
        """
    )


def test_match_keeps_upstream_statements_inside_the_template(rewrite, patch):
    patch.replace("f", "a = 1\nb = a", "if fast:\n    b = 1\nelse:\n    $match")
    before = """
        def f():

            # why
            a = 1

            b = a
            return b
    """
    assert rewrite(before, patch) == lines(
        """
        # [PATCHED: replace `a = 1 b = a` in f]
        def f():

            # why
            # --- Patch.1 ---
            if fast:
                b = 1
            else:
                a = 1

                b = a
            # --- Patch.1 ---
            return b
        """
    )


def test_operands_keep_their_grouping(rewrite, patch):
    patch.replace("f", "scale($x)", "$x * 2")
    patch.replace("f", "root($x)", "$x + 1")
    text = rewrite("def f(a, b):\n    return scale(a + b) ** 2, -root(a)\n", patch)
    assert "return ((a + b) * 2) ** 2, -(a + 1)" in text


def test_repeated_metavariable_must_match_equal_code(rewrite, patch):
    patch.replace("f", "$x * $x", "square($x)")
    assert "return square(a), a * b" in rewrite("def f(a, b):\n    return a * a, a * b\n", patch)


def test_pattern_ignores_formatting_and_quotes_but_not_meaning(rewrite, patch):
    patch.replace("f", "g(a, mode='x')", "h(a)")
    text = rewrite(
        'def f(a):\n    u = g(\n        a,  # first\n        mode="x",\n    )\n    v = g(a, mode="y")\n', patch
    )
    assert "u = h(a)" in text
    assert 'v = g(a, mode="y")' in text


def test_several_matches_in_one_statement_have_one_marker(rewrite, patch):
    patch.replace("f", "g($x)", "h($x)", count=2)
    assert rewrite("def f(a, b):\n    return g(a) + g(b)\n", patch) == lines(
        """
        # [PATCHED: replace `g($x)` in f]
        def f(a, b):
            # --- Patch.1 ---
            return h(a) + h(b)
            # --- Patch.1 ---
        """
    )


def test_alternative_patterns_support_several_releases(rewrite, patch):
    patch.replace("f", ["old(a)", "new(a)"], "ours(a)")
    assert "ours(a)" in rewrite("def f(a):\n    return old(a)\n", patch)
    assert "ours(a)" in rewrite("def f(a):\n    return new(a)\n", patch)


def test_wrong_number_of_matches_shows_upstream_text(rewrite, patch):
    patch.replace("Layer.forward", "self.up($x)", "up($x)", count=2)
    with pytest.raises(PatchError) as caught:
        rewrite(LAYER, patch)
    message = str(caught.value)
    assert "modeling_toy of transformers 9.0.0" in message
    assert "2 match(es) expected, 1 found" in message
    assert "self.up($x)" in message
    assert "upstream's Layer.forward, from line 2:" in message
    assert "z = self.act(self.gate(x)) * self.up(x)  # and me" in message


def test_more_matches_than_expected(rewrite, patch):
    patch.replace("f", "g($x)", "h($x)")
    with pytest.raises(PatchError, match=r"1 match\(es\) expected, 2 found"):
        rewrite("def f(a):\n    return g(a), g(1)\n", patch)


def test_missing_scope_suggests_close_names(rewrite, patch):
    patch.replace("Layer.fwd", "x", "y")
    with pytest.raises(PatchError, match=r"has no Layer\.fwd; similar names: Layer\.forward"):
        rewrite(LAYER, patch)


def test_unbound_name_in_a_template(rewrite, patch):
    patch.replace("Layer.forward", "self.up($x)", "up($y)")
    with pytest.raises(PatchError, match=r"uses \$y, which its pattern does not bind\n(.*\n)+  found: bound: \$x"):
        rewrite(LAYER, patch)


def test_matched_statements_in_an_expression_raise(rewrite, patch):
    patch.replace("Layer.forward", "return z", "return twice($match)")
    with pytest.raises(PatchError, match=r"uses \$match, which its pattern does not bind"):
        rewrite(LAYER, patch)


@pytest.mark.parametrize(
    ("source", "pattern"),
    [("def f(a):\n    return g(g(a))\n", "g($x)"), ("def f(a):\n    a()\n    a()\n    a()\n", "a()\na()\n")],
)
def test_overlapping_matches(rewrite, patch, source, pattern):
    patch.replace("f", pattern, "h", count=2)
    with pytest.raises(PatchError, match="its matches overlap"):
        rewrite(source, patch)


def test_all_problems_are_reported_together(rewrite, patch):
    patch.replace("Layer.forward", "nothing", "x")
    patch.replace("Layer.backward", "y", "x")
    with pytest.raises(PatchError, match=r"0 found(.|\n)*has no Layer\.backward"):
        rewrite(LAYER, patch)


def test_replacing_an_expression_by_statements_raises(rewrite, patch):
    patch.replace("Layer.forward", "self.up($x)", "return 1")
    with pytest.raises(PatchError, match="cannot be replaced by statements"):
        rewrite(LAYER, patch)


def test_pattern_with_invalid_syntax_raises(rewrite, patch):
    patch.replace("Layer.forward", "self.up(", "x")
    with pytest.raises(PatchError, match="a pattern is not Python code"):
        rewrite(LAYER, patch)


def test_two_edits_of_one_expression_raise_with_both_names(rewrite, patch):
    patch.replace("Layer.forward", "self.up($x)", "up($x)", note="first idea")
    patch.replace("Layer.forward", "up($x)", "down($x)", note="second idea")
    with pytest.raises(PatchError, match=r"second idea\n(.|\n)*already changed by `first idea`"):
        rewrite(LAYER, patch)


def test_nested_edit_in_an_unchanged_inner_statement(rewrite, patch):
    patch.replace("f", "a = g(x)\nb = a", "if fast:\n    b = 0\nelse:\n    $match")
    patch.replace("f", "g($x)", "h($x)")
    text = rewrite("def f(x):\n    a = g(x)\n    b = a\n    return b\n", patch)
    assert "a = h(x)" in text


def test_body_on_the_header_line(rewrite, patch):
    patch.replace("f", "x + 1", "x + 2")
    assert "return x + 2" in rewrite("def f(x): return x + 1\n", patch)


def test_summary_of_a_long_pattern_is_cut():
    patch = PatchConfig("a.b")
    patch.replace("f", "x" * 80, "y")
    assert patch.edits[0].summary == f"replace `{'x' * 57}...` in f"


def test_slot_prints_as_op_and_variant():
    slot = Slot("rotary_pos_emb", "full", name="query_rotary")
    assert (str(slot), slot.attribute) == ("rotary_pos_emb/full", "_opslot_query_rotary")
