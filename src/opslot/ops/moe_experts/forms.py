"""Upstream code that moe_experts replaces: an Experts module's forward. No torch here.

The slot sits outside the decorator `use_experts_implementation`, which dispatches around the method.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import indent

from opslot.patchgen import PatchConfig, Slot
from opslot.patchgen.forms import Match, MethodForms, ModuleView, Reviewed, Skip

_SUM = "the sum over the selected experts of weight * down(act(gate) * up)"
_BY_GATE = "the same with its gate in `_apply_gate`"
_ARGS = "{0}, self.gate_up_proj, self.down_proj, {1}, {2}"
_WITH_ACTIVATION = f"{_ARGS}, self.act_fn"
_UNTIL_517 = "before 5.18"
# Loops over the experts with `_apply_gate`.
_LOOPS = (("00f4b681a538", _UNTIL_517), ("62e1dbd78bc1", "from 5.18"))

# `_apply_gate` on concatenated gate and up: (fingerprint, what it computes, further arguments, architectures)
_GATES = (
    ("9656330a43f7", "act(min(gate, limit)) * clamp(up)", ", self.limit", "deepseek_v4"),
    ("73766c981cde", "silu(min(gate, limit)) * clamp(up)", ", self.swiglu_limit", "glm5_next, hy_v4"),
    (
        "e452f44b4ef6",
        "min(act(gate), limit) * clamp(up)",
        ", self.limit, 1.0, 0.0, True",
        "step3p7",
    ),
    (
        "0b8cf80fe18e",
        "min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (1 + clamp(up))",
        ", self.swiglu_limit, self.swiglu_alpha, 1.0",
        "minimax_m3_vl",
    ),
)

_PARAMETERS = ("hidden_states", "top_k_index", "top_k_weights")

# Every expert computes every token times its routing weight, which is zero for the experts that are not selected. By
# `sort`, since `opslot.verify.bisect` counts the calls of `topk`, which has selected them.
_LLAMA4 = (
    "experts",
    """\
$rows = $x.repeat($scores.shape[1], 1)
$rows = $rows * $scores.transpose(0, 1).reshape(-1, 1)
$experts_out = self.experts($rows)
$out = self.shared_expert($x)
$out.add_($experts_out.reshape($scores.shape[1], -1, $experts_out.shape[-1]).sum(dim=0))
""",
    """\
top_k_weights, top_k_index = (x[:, : self.top_k] for x in $scores.sort(dim=-1, descending=True))
$rows = ($x.unsqueeze(1) * top_k_weights.unsqueeze(-1)).flatten(0, 1)
$experts_out = self.experts($rows, top_k_index.reshape(-1, 1), torch.ones_like(top_k_weights).reshape(-1, 1))
$out = self.shared_expert($x) + $experts_out.view(-1, self.top_k, $experts_out.shape[-1]).sum(dim=1)
""",
)
# One expert after the other.
_DBRX = (
    "mlp",
    "$batch = $x.shape[0]",
    """\
experts_out = self.mlp($x.reshape(-1, self.hidden_size), top_k_index, top_k_weights)
return experts_out.view($x.shape[0], -1, self.hidden_size)
""",
)

_WHOLE_METHODS = MethodForms(
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
            for forward, releases in _LOOPS
            for hash_of_gate, gate, args, seen in _GATES
        ),
        *(
            Reviewed(forward, "standard", f"{_BY_GATE}, in fp32", f"beam, {releases}", "24ab61457d1a", _WITH_ACTIVATION)
            for forward, releases in _LOOPS
        ),
        Reviewed("18105b082497", "transposed", f"{_SUM}, transposed", "aria, from 5.18", args=_WITH_ACTIVATION),
        *(
            Reviewed(
                hash_,
                "ungated",
                "the sum over the selected experts of weight * down(act(up))",
                f"nemotron_h, {releases}",
                args="{0}, self.up_proj, self.down_proj, {1}, {2}, self.act_fn",
            )
            for hash_, releases in (("7cf7bc7224ac", _UNTIL_517), ("3c5d81d88b0f", "from 5.18"))
        ),
        Reviewed(
            "d4b9e8835832",
            "standard",
            f"{_SUM}; experts from num_routed_experts on return their input",
            "longcat_flash",
            # `gate_up_proj` also has rows for those, which nothing reads.
            args=(
                "{0}, self.gate_up_proj[: self.num_routed_experts], self.down_proj,"
                " {1}.clamp(max=self.num_routed_experts), {2}, self.act_fn"
            ),
            returns=("{call} + ({0} * ({2} * ({1} >= self.num_routed_experts)).sum(-1, keepdim=True)).to({0}.dtype)"),
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
)

# Experts whose arguments a kernel cannot take, as reviewed callers call them.
_CALLED = (
    Reviewed(
        "4558ac653784",
        "transposed",
        "down(act(gate) * up) of each expert on its part of the rows",
        "llama4",
        args=f"{_ARGS.format(*_PARAMETERS)}, self.act_fn",
    ),
    Reviewed(
        "5632453c85b1",
        "split",
        "down(act(gate) * up) with one expert's weights",
        "dbrx",
        args=(
            "hidden_states, self.w1.unflatten(0, (-1, self.ffn_hidden_size)),"
            " self.v1.unflatten(0, (-1, self.ffn_hidden_size)),"
            " self.w2.unflatten(0, (-1, self.ffn_hidden_size)),"
            " top_k_index, top_k_weights, self.activation_fn"
        ),
    ),
)
# By fingerprint of a caller's `forward`: the attribute that holds the experts, the statements that are replaced, and
# what runs instead while a kernel is bound.
_CALLERS = {"9e8b75a13d3e": _LLAMA4, "beccf0e1eeb0": _DBRX, "dbc772826d4c": _DBRX}


def find_experts(module: ModuleView) -> Iterator[Match | Skip]:
    """Classes whose `forward` is the op, and pairs of a class of `_CALLED` and its caller.

    Of a pair, the slot is on the class that owns the weights, outside its `forward`. While a kernel is bound, the
    caller passes `_PARAMETERS` instead.
    """
    rows = {row.hash: row for row in _CALLED}
    owners = {name: rows[h] for name, f in module.methods() if (h := module.fingerprint(f)) in rows}
    callers = [(f, _CALLERS[h]) for _, f in module.methods() if (h := module.fingerprint(f)) in _CALLERS]
    found = set()
    # One class of each kind; with more, it is unknown which belong together.
    if len(owners) == len(callers) == 1:
        ((owner, row),), ((caller, call),) = owners.items(), callers
        found = {owner, caller.partition(".")[0]}
        yield _called(owner, row, caller, *call)
    yield from (f for f in _WHOLE_METHODS(module) if not (isinstance(f, Skip) and f.symbol in found))


def _called(owner: str, row: Reviewed, caller: str, attribute: str, pattern: str, instead: str) -> Match:
    slot, forward = Slot(_WHOLE_METHODS.op, row.variant), f"{owner}.forward"

    def write(patch: PatchConfig) -> None:
        patch.slot_method(
            forward, slot, args=row.args, expects=row.hash, outside_decorators=True, parameters=_PARAMETERS
        )
        patch.add_import("opslot.ops.moe_experts.calls", ["has_kernel"])
        instead_indented = indent(instead.strip(), "    ")
        patch.replace(caller, pattern, f"if has_kernel(self.{attribute}):\n{instead_indented}\nelse:\n    $match")

    return Match(owner, slot.op, row.variant, write)


FORMS = (find_experts,)
