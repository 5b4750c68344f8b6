"""Upstream code that moe_experts replaces: an Experts module's forward. No torch here.

The slot sits outside the decorator `use_experts_implementation`, which dispatches around the method.
"""

from __future__ import annotations

from opslot.patchgen.forms import MethodForms, Reviewed

_SUM = "the sum over the selected experts of weight * down(act(gate) * up)"
_BY_GATE = "the same with its gate in `_apply_gate`"
_ARGS = "{0}, self.gate_up_proj, self.down_proj, {1}, {2}"
_WITH_ACTIVATION = f"{_ARGS}, self.act_fn"
_UNTIL_517 = "before 5.18"

# `_apply_gate` on concatenated gate and up: (fingerprint, what it computes, further arguments, architectures)
_GATES = (
    ("9656330a43f7", "act(min(gate, limit)) * clamp(up)", ", self.limit", "deepseek_v4"),
    ("73766c981cde", "silu(min(gate, limit)) * clamp(up)", ", self.swiglu_limit", "glm5_next, hy_v4"),
    (
        "0b8cf80fe18e",
        "min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (1 + clamp(up))",
        ", self.swiglu_limit, self.swiglu_alpha, 1.0",
        "minimax_m3_vl",
    ),
)

FORMS = (
    MethodForms(
        op="moe_experts",
        helper="_apply_gate",
        rows=(
            Reviewed(
                "d81e6d7d92e0",
                "standard",
                _SUM,
                f"qwen3_moe, mixtral, deepseek_v3, {_UNTIL_517}",
                args=_WITH_ACTIVATION,
            ),
            Reviewed(
                "eb94b9fca4df",
                "standard",
                f"{_SUM}; an index equal to num_experts adds nothing",
                "qwen3_moe, mixtral, deepseek_v3 and 50 more, from 5.18",
                args=_WITH_ACTIVATION,
            ),
            *(
                Reviewed(forward, "clamped", f"{_BY_GATE}: {gate}", f"{seen}, {releases}", hash_of_gate, _ARGS + args)
                for forward, releases in (("00f4b681a538", _UNTIL_517), ("62e1dbd78bc1", "from 5.18"))
                for hash_of_gate, gate, args, seen in _GATES
            ),
            Reviewed(
                "ccbf06b66aeb",
                "biased",
                f"{_SUM}, with biases, transposed weights and gate, up in turn",
                "gpt_oss",
                "8a227863cfdb",
                f"{_ARGS}, self.gate_up_proj_bias, self.down_proj_bias, self.limit, self.alpha",
            ),
        ),
        candidate=lambda name, text: name.endswith("Experts"),
        reason="computes something else than the reviewed forms of experts",
        outside_decorators=True,
        depends=("transformers.integrations.moe:use_experts_implementation",),
    ),
)
