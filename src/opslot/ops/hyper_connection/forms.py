"""Transformers code that hyper_connection replaces. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from opslot.patchgen import PatchConfig, Slot
from opslot.patchgen.forms import Match, MethodForms, ModuleView, Reviewed, Skip

OP = "hyper_connection"
_REASON = "combines streams in another way than the reviewed forms"
# The norm of all streams: x times the inverse root mean square, or that factor alone.
_NORMED, _FACTOR = "facf4063acb8", "fc5bf0e9ce07"
_PARAMETERS = "{0}, self.fn, self.base, self.scale, self.input_norm.eps, self.hc_eps"
_HEAD_PARAMETERS = "{0}, self.hc_fn, self.hc_base, self.hc_scale, self.input_norm.eps, self.eps"
_SINKHORN = "pre, post and a matrix made doubly stochastic, and the collapsed streams"
_INDEPENDENT = "pre and post, and the collapsed streams"
_ROWS = (
    *(
        Reviewed(hash_, "sinkhorn", _SINKHORN, seen, _NORMED, f"{_PARAMETERS}, self.hc_sinkhorn_iters")
        for hash_, seen in (
            ("9c95a6496baa", "deepseek_v4, glm5_next before 5.20"),
            ("c897b0d379e6", "deepseek_v4, glm5_next"),
        )
    ),
    *(
        Reviewed(hash_, "independent", _INDEPENDENT, seen, _FACTOR, f"{_PARAMETERS}, self.hc_post_magnitude")
        for hash_, seen in (("659c45990f4f", "hy_v4 before 5.20"), ("4707658464f1", "hy_v4, hy_v4_vl"))
    ),
    Reviewed("bb82cfcd4254", "head", "streams times pre, summed", "deepseek_v4", _NORMED, _HEAD_PARAMETERS),
    Reviewed("f598a2bcead9", "head", "streams times pre, summed", "hy_v4 before 5.20", _FACTOR, _HEAD_PARAMETERS),
    Reviewed("5be20d3574de", "head", "streams times pre, summed", "hy_v4, hy_v4_vl", _FACTOR, _HEAD_PARAMETERS),
)
# Expressions of layers, by variant, and the arguments of the slot.
_EXPRESSIONS = {
    "mix": (
        (
            "$post.to(dtype).unsqueeze(-1) * $output.unsqueeze(-2)"
            " + torch.matmul($comb.to(dtype).transpose(-1, -2), $streams)"
        ),
        "$post, $comb, $output, $streams",
    ),
    "add": (
        "($post.float().unsqueeze(-1) * $output.float().unsqueeze(-2) + $streams.float()).to(dtype)",
        "$post, $output, $streams",
    ),
}


class Collapses(MethodForms):
    """Classes whose `forward` collapses streams; `Reviewed.helper` is the fingerprint of the norm's forward."""

    def row(self, module: ModuleView, name: str) -> Reviewed | None:
        norm = re.search(rf"self\.{self.helper} = (\w+)\(", module.text(f"{name}.__init__"))
        key = module.fingerprint(f"{name}.forward"), module.fingerprint(f"{norm[1]}.forward") if norm else None
        return next((row for row in self.rows if (row.hash, row.helper) == key), None)


def find_next_streams(module: ModuleView) -> Iterator[Match | Skip]:
    """Expressions of a layer that make the next streams from its output, those of one variant."""
    for name, forward in module.methods():
        text = module.text(forward)
        if "_hc(" not in text or "dtype = hidden_states.dtype" not in text:
            continue
        for variant, (pattern, args) in _EXPRESSIONS.items():
            if count := module.count(forward, pattern):
                yield Match(name, OP, variant, partial(_write_expression, forward, variant, pattern, args, count))
                break
        else:
            yield Skip(name, OP, _REASON)


def _write_expression(method: str, variant: str, pattern: str, args: str, count: int, patch: PatchConfig) -> None:
    patch.slot_expr(method, Slot(OP, variant), pattern, args=args, count=count)


FORMS = (
    Collapses(
        op=OP,
        rows=_ROWS,
        helper="input_norm",
        candidate=lambda name, text: "self.input_norm(" in text and "sigmoid" in text,
        reason=_REASON,
    ),
    find_next_streams,
)
