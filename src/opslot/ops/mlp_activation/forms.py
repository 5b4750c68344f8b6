"""Transformers code that mlp_activation replaces: the activation of an MLP without a gate. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from opslot.patchgen import PatchConfig, Slot
from opslot.patchgen.forms import ACTIVATION_ATTRIBUTES, Match, ModuleView, Skip

_OP = "mlp_activation"
_ARGUMENTS = {
    "relu2": "$x",
    "xielu": "$x, self.{act}.alpha_p, self.{act}.alpha_n, self.{act}.beta, self.{act}.eps",
}
# Activations that a constructor takes from a config, which may be one that the kernels compute.
_FROM_CONFIG = re.compile(r"ACT2FN\[(config\.\w+(\.\w+)*|hidden_act)\]")


class UngatedMLPs:
    """The only call of the activation in an MLP that multiplies nothing; its class decides which kernel it can have."""

    def find(self, module: ModuleView) -> Iterator[Match | Skip]:
        for name, forward in module.methods():
            text = module.text(forward)
            if not name.endswith("MLP") or "act" not in text or " * " in text:
                continue
            used = [act for act in ACTIVATION_ATTRIBUTES if f"self.{act}(" in text]
            if len(used) != 1 or module.count(forward, f"self.{used[0]}($x)") != 1:
                yield Skip(name, _OP, "calls its activation in another way than act(x), once")
            elif "Vision" in name or "Audio" in name:
                yield Skip(name, _OP, "is in an image or audio tower, and its activation is one elementwise op")
            else:
                yield self._find(module, name, forward, used[0])

    def _find(self, module: ModuleView, name: str, forward: str, act: str) -> Match | Skip:
        init = module.text(f"{name}.__init__")
        if not _FROM_CONFIG.search(init):
            return Skip(name, _OP, "has a fixed activation, which is one elementwise op")
        slot = Slot(_OP, "xielu" if "xielu" in init else "relu2")

        def write(patch: PatchConfig) -> None:
            kernel, args = f"self.{slot.attribute}", _ARGUMENTS[slot.variant].format(act=act)
            patch.replace(
                forward,
                f"self.{act}($x)",
                f"({kernel}({args}) if {kernel} is not None and {kernel}.can_serve(self.{act}) else $match)",
                slot=slot,
            )
            if slot.variant == "xielu":
                patch.depends_on("transformers.activations", "XIELUActivation._xielu_python")

        return Match(name, slot.op, slot.variant, write)


FORMS = (UngatedMLPs(),)
