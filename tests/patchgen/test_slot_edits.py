"""Slots: text before and after, and bodies that a slot must not replace."""

from __future__ import annotations

import pytest

from opslot.patchgen import PatchError, Slot
from opslot.patchgen.fingerprint import fingerprint
from tests.patchgen.text import lines

NORM = """
    class Norm(Module):
        def __init__(self, size):
            self.weight = ones(size)

        @hub("norm")
        def forward(self, x: Tensor) -> Tensor:
            '''Normalises.'''
            return self.weight * x
"""


def test_slot_in_front_of_a_method(rewrite, patch):
    patch.slot_method("Norm.forward", Slot("rms_norm"), args="x, self.weight")
    assert rewrite(NORM, patch) == lines(
        """
        class Norm(Module):
            # --- Patch.1 ---
            _opslot_slots = {"rms_norm": ("rms_norm", "standard")}
            _opslot_rms_norm = None
            # --- Patch.1 ---

            def __init__(self, size):
                self.weight = ones(size)

            # [PATCHED: slot rms_norm/standard in front of forward]
            @hub("norm")
            def forward(self, x: Tensor) -> Tensor:
                '''Normalises.'''
                # --- Patch.1 ---
                if self._opslot_rms_norm is not None:
                    return self._opslot_rms_norm(x, self.weight)
                # --- Patch.1 ---
                return self.weight * x
        """
    )


def test_slot_outside_decorators(rewrite, patch):
    before = """
        @dispatched
        class Experts(Module):
            '''Experts.'''

            def forward(self, x: Tensor, index, weights) -> Tensor:
                return x


        class After:
            pass
    """
    patch.slot_method("Experts.forward", Slot("moe_experts"), args="x, self.w, index, weights", outside_decorators=True)
    assert rewrite(before, patch) == lines(
        """
        # [PATCHED: slot moe_experts/standard outside the decorators of forward, below the class]
        @dispatched
        class Experts(Module):
            '''Experts.'''

            # --- Patch.1 ---
            _opslot_slots = {"moe_experts": ("moe_experts", "standard")}
            _opslot_moe_experts = None
            # --- Patch.1 ---

            def forward(self, x: Tensor, index, weights) -> Tensor:
                return x


        # --- Patch.1 ---
        _opslot_dispatch_Experts = Experts.forward


        def _opslot_forward_Experts(self, x, index, weights):
            if self._opslot_moe_experts is not None:
                return self._opslot_moe_experts(x, self.w, index, weights)
            return _opslot_dispatch_Experts(self, x, index, weights)


        Experts.forward = _opslot_forward_Experts
        # --- Patch.1 ---


        class After:
            pass
        """
    )


@pytest.mark.parametrize("parameters", ["self, x, **kwargs", "self, x, *, y", "self, *x"])
def test_slot_outside_decorators_needs_plain_parameters(rewrite, patch, parameters):
    patch.slot_method("E.forward", Slot("moe_experts"), args="x", outside_decorators=True)
    with pytest.raises(PatchError, match="only plain parameters"):
        rewrite(f"class E:\n    def forward({parameters}): ...\n", patch)


def test_slot_outside_decorators_passes_default_values(rewrite, patch):
    patch.slot_method("E.forward", Slot("moe_experts"), args="x, y", outside_decorators=True)
    text = rewrite("class E:\n    def forward(self, x: Tensor, y: int | None = None): ...\n", patch)
    assert "def _opslot_forward_E(self, x, y=None):" in text
    assert "return _opslot_dispatch_E(self, x, y)" in text


CALLS = """
    def rotate_half(x):
        return cat(-x[1], x[0])


    @hub("rotary")
    def rotary(q, k, cos, sin, unsqueeze_dim=1):
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


    @uses(rotary)
    class Attention(Module):
        def forward(self, q, k, cos, sin):
            q, k = rotary(q, k, cos, sin)
            return q, k


    class Cross(Module):
        def forward(self, q, k, cos, sin):
            if cos is not None:
                return rotary(
                    q, k, cos, sin,
                )
"""


def test_slot_calls_replaces_calls_and_keeps_other_uses(rewrite, patch):
    patch.slot_calls("rotary", Slot("rotary_pos_emb", "full"), count=2)
    text = rewrite(CALLS, patch)
    assert text.split("@uses", 1)[1] == lines(
        """
        (rotary)
        class Attention(Module):
            # --- Patch.1 ---
            _opslot_slots = {"rotary_pos_emb": ("rotary_pos_emb", "full")}
            _opslot_rotary_pos_emb = None
            # --- Patch.1 ---

            # [PATCHED: slot rotary_pos_emb/full on the call of rotary]
            def forward(self, q, k, cos, sin):
                # --- Patch.1 ---
                q, k = (self._opslot_rotary_pos_emb or rotary)(q, k, cos, sin)
                # --- Patch.1 ---
                return q, k


        class Cross(Module):
            # --- Patch.1 ---
            _opslot_slots = {"rotary_pos_emb": ("rotary_pos_emb", "full")}
            _opslot_rotary_pos_emb = None
            # --- Patch.1 ---

            # [PATCHED: slot rotary_pos_emb/full on the call of rotary]
            def forward(self, q, k, cos, sin):
                if cos is not None:
                    # --- Patch.1 ---
                    return (self._opslot_rotary_pos_emb or rotary)(
                        q, k, cos, sin,
                    )
                    # --- Patch.1 ---
        """
    )


@pytest.mark.parametrize(("count", "problem"), [(3, r"3 call\(s\) of rotary .* expected, 2 found")])
def test_slot_calls_checks_the_number_of_calls(rewrite, patch, count, problem):
    patch.slot_calls("rotary", Slot("rotary_pos_emb", "full"), count=count)
    with pytest.raises(PatchError, match=problem):
        rewrite(CALLS, patch)


def test_slot_calls_outside_a_class_raise(rewrite, patch):
    patch.slot_calls("rotary", Slot("rotary_pos_emb", "full"))
    source = "def rotary(x): ...\n\nclass A:\n    @staticmethod\n    def forward(x):\n        return rotary(x)\n"
    with pytest.raises(PatchError, match=r"A\.forward has no `self` to hold the slot"):
        rewrite(source, patch)


def test_slot_outside_a_method_raises(patch):
    slot = Slot("rms_norm")
    with pytest.raises(PatchError, match=r"is not in a method\n  found: 'norm'\n  hint: name one as Class\.method"):
        patch.slot_method("norm", slot, args="x")
    with pytest.raises(PatchError, match="is not in a method"):
        patch.replace("norm", "x", "y", slot=slot)


def test_slot_calls_without_a_call_raises(rewrite, patch):
    patch.slot_calls("rotate_half", Slot("rotary_pos_emb", "full"))
    with pytest.raises(PatchError, match=r"at least one call\(s\) of rotate_half .* 0 found"):
        rewrite(CALLS, patch)


def test_changed_helper_body_raises(rewrite, patch):
    """The same rotary function computes another rotation if `rotate_half` is interleaved."""
    known = fingerprint("def rotate_half(x):\n    return cat(-x[1], x[0])\n")
    patch.slot_calls("rotary", Slot("rotary_pos_emb", "full"), expects={"rotate_half": known})
    rewrite(CALLS, patch)
    with pytest.raises(PatchError) as caught:
        rewrite(CALLS.replace("cat(-x[1], x[0])", "cat(-x[0], x[1])"), patch)
    assert "rotate_half computes something else" in str(caught.value)
    assert f"expected {known}" in str(caught.value)
    assert "return cat(-x[0], x[1])" in str(caught.value)


def test_changed_method_body_raises(rewrite, patch):
    known = fingerprint("def forward(self, y):\n    return self.weight * y\n")
    patch.slot_method("Norm.forward", Slot("rms_norm"), args="x, self.weight", expects=known)
    rewrite(NORM, patch)
    with pytest.raises(PatchError, match=r"Norm\.forward computes something else"):
        rewrite(NORM.replace("self.weight * x", "(1 + self.weight) * x"), patch)


def test_slot_expression(rewrite, patch):
    before = """
        class MLP(Module):
            def forward(self, x):
                return self.down(self.act_fn(self.gate(x)) * self.up(x))
    """
    patch.slot_expr("MLP.forward", Slot("swiglu_mlp"), "self.act_fn($gate) * $up", args="$gate, $up")
    assert (
        "return self.down(self._opslot_swiglu_mlp(self.gate(x), self.up(x)) if self._opslot_swiglu_mlp is not None"
        " else self.act_fn(self.gate(x)) * self.up(x))\n"
    ) in rewrite(before, patch)


def test_slots_of_one_class_share_one_table(rewrite, patch):
    patch.slot_calls("rotary", Slot("rotary_pos_emb", "full"))
    patch.slot_method("Attention.forward", Slot("attention"), args="q, k")
    text = rewrite(CALLS, patch)
    assert (
        '_opslot_slots = {"rotary_pos_emb": ("rotary_pos_emb", "full"), "attention": ("attention", "standard")}' in text
    )
    assert "# --- Patch.1, Patch.2 ---" in text


def test_two_variants_of_one_op_in_a_class_require_names(rewrite, patch):
    patch.slot_calls("rotary", Slot("rotary_pos_emb", "full"))
    patch.slot_method("Attention.forward", Slot("rotary_pos_emb", "partial"), args="q, k")
    with pytest.raises(PatchError, match=r"already has the slot rotary_pos_emb/full .* give .* its own name"):
        rewrite(CALLS, patch)


def test_two_slots_on_one_method_raise(rewrite, patch):
    patch.slot_method("Norm.forward", Slot("rms_norm"), args="x")
    patch.slot_method("Norm.forward", Slot("other"), args="x")
    with pytest.raises(
        PatchError, match=r"edit the same code\n  found: `slot rms_norm/standard .*` .* and `slot other/standard .*`"
    ):
        rewrite(NORM, patch)


LAYERS = """
    from __future__ import annotations
    import torch
    from torch import nn
    from .outputs import Output
    from .utils import can_return_tuple, logging
    from .models.auto import AutoModel

    logger = logging.get_logger(__name__)


    class GenericHead:
        def __init__(self, config):
            super().__init__(config)
            self.model = AutoModel.from_config(config)

        @can_return_tuple
        def forward(self, x: torch.Tensor) -> Output:
            logger.info("forward")
            return Output(self.model(x))
"""


def test_inherit_method(rewrite, patch):
    before = """
        import torch
        from ...layers import GenericHead


        class Head(GenericHead, Base): ...
    """
    patch.inherit_method("Head.__init__", "transformers.layers", "GenericHead.__init__")
    patch.inherit_method("Head.forward", "transformers.layers", "GenericHead.forward")
    patch.replace("Head.__init__", "AutoModel.from_config(config)", "Model(config)")
    assert rewrite(before, patch, **{"transformers.layers": LAYERS}) == lines(
        """
        import torch
        from transformers.layers import GenericHead
        # [PATCHED: imports of the patches]
        from transformers.layers import logger
        from transformers.outputs import Output
        from transformers.utils import can_return_tuple


        class Head(GenericHead, Base):

            # [PATCHED: text of transformers.layers.GenericHead.__init__]
            # [PATCHED: replace `AutoModel.from_config(config)` in Head.__init__]
            def __init__(self, config):
                super(GenericHead, self).__init__(config)
                # --- Patch.3 ---
                self.model = Model(config)
                # --- Patch.3 ---

            # [PATCHED: text of transformers.layers.GenericHead.forward]
            @can_return_tuple
            def forward(self, x: torch.Tensor) -> Output:
                logger.info("forward")
                return Output(self.model(x))
        """
    )


@pytest.mark.parametrize(
    ("before", "problem"),
    [
        ("class Head(Base): ...", "Head does not inherit from GenericHead"),
        ("class Head(GenericHead):\n    def forward(self, x): ...", r"Head\.forward is defined by the class itself"),
        ("from elsewhere import Output\nclass Head(GenericHead): ...", "Output is `from elsewhere import Output` here"),
    ],
)
def test_inherit_method_raises(rewrite, patch, before, problem):
    patch.inherit_method("Head.forward", "transformers.layers", "GenericHead.forward")
    with pytest.raises(PatchError, match=problem):
        rewrite(before, patch, **{"transformers.layers": LAYERS})


def test_method_takes_any_keyword_argument(rewrite, patch):
    source = """
        class Mixer(Module):
            def forward(self, x, mask=None):
                return x
    """
    patch.take_keywords("Mixer.forward")
    assert rewrite(source, patch) == lines(
        """
        class Mixer(Module):
            # [PATCHED: let Mixer.forward take any keyword argument]
            def forward(self, x, mask=None, **kwargs):
                return x
        """
    )


def test_method_that_takes_any_keyword_argument_already(rewrite, patch):
    patch.take_keywords("Mixer.forward")
    with pytest.raises(PatchError, match="takes any keyword argument already"):
        rewrite("class Mixer:\n    def forward(self, **kwargs):\n        pass\n", patch)


def test_undecorated_copy_of_a_function(rewrite, patch):
    source = """
        @replaced_by("another package")
        def scan(x):
            return x


        class Mixer(Module):
            def forward(self, x):
                return scan(x)
    """
    patch.copy_undecorated("scan", "_plain_scan")
    patch.copy_undecorated("scan", "_plain_scan")
    patch.replace("Mixer.forward", "scan($x)", "_plain_scan($x)")
    text = rewrite(source, patch)
    assert text.count("def _plain_scan(x):") == 1
    assert text.count("@replaced_by") == 1
    assert "return _plain_scan(x)" in text
