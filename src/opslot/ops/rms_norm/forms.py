"""Transformers code that rms_norm replaces. Does not import torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from opslot.patchgen import PatchConfig, Slot
from opslot.patchgen.forms import Match, MethodForms, ModuleView, Reviewed, Skip
from opslot.patchgen.upstream import nodes_below

# `_norm` of classes with a separate method: x / rms(x).
_NORMALIZED = "afb4c281cbb3"
_EPSILON, _EPS = "{0}, self.weight, self.variance_epsilon{rest}", "{0}, self.weight, self.eps{rest}"
# `_norm` of classes with a separate method: x / rms(x), by a power of -0.5.
_POWER = "4d43b729b274"


def _is_other_norm(name: str, text: str) -> bool:
    """Whether a norm is a batch norm, or a layer norm that subtracts the mean, unlike T5's."""
    return "BatchNorm" in name or ("LayerNorm" in name and bool(re.search(r"\w - \w", text)))


NORMS = MethodForms(
    op="rms_norm",
    helper="_norm",
    rows=(
        Reviewed(
            "74308f676262",
            "standard",
            "weight * (x / rms(x)), normalized in fp32, cast back before the weight",
            "llama, qwen2, qwen3, mistral, deepseek_v3 and 129 more",
            args=_EPSILON,
        ),
        Reviewed("376dac74119d", "standard", "the same with `_norm`", "llama4", _NORMALIZED, _EPS),
        Reviewed(
            "9f7bc56f7622",
            "standard",
            "the same, in the weight's dtype where that is half precision, else in the promoted dtype",
            "t5, mt5, umt5, longt5, switch_transformers, pix2struct, pop2piano, udop",
            args="{0}.to(torch.promote_types({0}.dtype, self.weight.dtype)), self.weight, self.variance_epsilon{rest}",
            returns="{call}.to(self.weight.dtype)",
        ),
        Reviewed("3946628b5d30", "standard", "the standard norm of a checked width", "cpmant", args=_EPS),
        Reviewed(
            "5d81960fd651",
            "cast_after_weight",
            "weight * (x / rms(x)) in fp32, cast back after the weight",
            "olmo2, olmo3, gpt_oss, afmoe, flex_olmo and 6 more",
            args=_EPSILON,
        ),
        Reviewed(
            "29ec1ea12754", "cast_after_weight", "the same, weight upcast by name", "helium, nemotron_h", args=_EPSILON
        ),
        Reviewed(
            "693c1a1f88b6",
            "cast_after_weight",
            "the same with `_norm`",
            "moshi, kyutai_speech_to_text",
            _NORMALIZED,
            _EPS,
        ),
        *(
            Reviewed(hash_, "gated", "the standard norm, times silu(gate) in fp32, cast back", seen, args=_EPSILON)
            for hash_, seen in (
                ("24fae62042bf", "qwen3_next, qwen3_5, qwen3_5_moe, olmo_hybrid, qwen4_exp, from 5.17"),
                ("e5b46837c975", "the same, 5.15 and 5.16"),
                ("b4fd67d9758f", "the same, before 5.15"),
            )
        ),
        Reviewed(
            "b1c97535587f",
            "gated_groups",
            "weight * (x / rms(x)) * ACT2FN[activation](gate) in fp32, cast back",
            "kimi_linear, bailing_hybrid, glm5_next, lara_mini",
            args="{0}, self.weight, self.variance_epsilon, {1}, {0}.shape[-1], True, True, self.activation",
        ),
        *(
            Reviewed(
                hash_,
                "gated_groups",
                "x * silu(gate) in fp32, normalized in groups, cast back, times weight",
                seen,
                args=f"{{0}}, self.weight, self.variance_epsilon, {{1}}, {size}",
            )
            for hash_, size, seen in (
                ("55b5b1542b35", "self.group_size", "zamba2, nemotron_h; bamba, granitemoehybrid, mamba2 from 5.23"),
                ("c6c6fd43b3db", "{0}.shape[-1]", "bamba, granitemoehybrid, mamba2 before 5.23"),
            )
        ),
        Reviewed(
            "d2e9f178dc33",
            "gated_groups",
            "the same with weight and cast after it, the gate before or after",
            "falcon_h1, from 5.23",
            args=(
                "{0}, self.weight, self.variance_epsilon, {1}, {0}.shape[-1] // self.n_groups, self.norm_before_gate,"
                " True"
            ),
        ),
        Reviewed(
            "fd8cae7324ce",
            "weight_offset",
            "(1 + weight) * (x / rms(x)) in fp32, cast back after the weight",
            "gemma, gemma2, gemma3, qwen3_next, qwen3_5 and 9 more",
            _NORMALIZED,
            _EPS,
        ),
        Reviewed(
            "fd8cae7324ce",
            "weight_offset_groups",
            "the same, normalized in groups where the module has them",
            "qwen4_exp",
            "8c8ba17c9d35",
            f"{_EPS}, self.group_size",
        ),
        Reviewed(
            "816fd1ef7e4a",
            "cast_after_weight",
            "weight * (x / rms(x)) in fp32, cast back after the weight; without a weight if with_scale is False",
            "gemma3n, gemma4, gemma4_unified, neomme",
            _POWER,
            "{0}, self.weight if self.with_scale else {0}.new_ones({0}.shape[-1]), self.eps{rest}",
        ),
        Reviewed(
            "facf4063acb8",
            "unweighted",
            "x * (1 / rms(x)), with 1 / rms(x) cast back",
            "deepseek_v4, glm5_next; inkling2 before 5.24",
            args="{0}, self.eps{rest}",
        ),
        Reviewed(
            "2b2f5190dfa8",
            "unweighted",
            "x / rms(x) in fp32, cast back",
            "inkling2 and inkling2_loop from 5.24",
            args="{0}, self.eps{rest}",
        ),
        Reviewed(
            "59461105bbb1",
            "unweighted",
            "x / rms(x) in fp32, cast back",
            "nanochat, llama4, falcon_mamba",
            _NORMALIZED,
            "{0}, self.eps{rest}",
        ),
    ),
    candidate=lambda name, text: (
        "RMSNorm" in name or ("Norm" in name and "rsqrt" in text and not _is_other_norm(name, text))
    ),
    reason="computes another norm than the reviewed forms",
    synonyms=("variance_epsilon", "eps", "epsilon", "norm_eps"),
)

# The norm's variant -> the variant that also adds the residual.
_WITH_RESIDUAL = {
    "standard": "fused_add",
    "cast_after_weight": "fused_add_cast_after_weight",
    "weight_offset": "fused_add_weight_offset",
}

# The residual addition and the norm after it; `x` is any expression.
_SUMS = ("$h = $residual + $x", "$h = $x + $residual")
_NORM = "$residual = $h\n$h = self.{norm}($h)"


def find_residual_norms(module: ModuleView) -> Iterator[Match | Skip]:
    """The residual addition of a layer together with the norm that follows it.

    The last addition of a layer is followed by the next layer's norm, which this layer's forward cannot reach.
    """
    for name, forward in module.methods():
        found = list(_residual_norms(module.function(forward)))
        if len(found) != 1:
            continue
        (norm,) = found
        made = re.search(rf"self\.{norm} = (\w+)\(", module.text(f"{name}.__init__"))
        row = NORMS.row(module, made.group(1)) if made and made.group(1) in module.classes else None
        if row is not None and row.variant in _WITH_RESIDUAL and row.returns == "{call}":
            yield _match(name, forward, row, norm)


def _match(name: str, forward: str, row: Reviewed, norm: str) -> Match:
    slot = Slot("rms_norm", _WITH_RESIDUAL[row.variant])
    args = row.args.removeprefix("{0}, ").format("$residual", rest="").replace("self.", "norm.")

    def write(patch: PatchConfig) -> None:
        patch.replace(
            forward,
            [f"{total}\n{_NORM.format(norm=norm)}" for total in _SUMS],
            f"""
            norm = self.{norm}
            if self.{slot.attribute} is not None and self.{slot.attribute}.can_serve(norm):
                $h, $residual = self.{slot.attribute}($x, $residual, {args})
            else:
                $match
            """,
            slot=slot,
        )

    return Match(name, slot.op, slot.variant, write)


def _residual_norms(forward: ast.AST) -> Iterator[str]:
    """The attribute of the norm of each `_SUMS` + `_NORM` in a forward."""
    for node in nodes_below(forward):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for three in zip(body, body[1:], body[2:], strict=False):
            match three:
                case (
                    ast.Assign(targets=[ast.Name(id=h)], value=ast.BinOp(left=left, op=ast.Add(), right=right)),
                    ast.Assign(targets=[ast.Name(id=residual)], value=ast.Name(id=h2)),
                    ast.Assign(
                        targets=[ast.Name(id=h3)],
                        value=ast.Call(ast.Attribute(ast.Name(id="self"), norm), args=[ast.Name(id=h4)], keywords=[]),
                    ),
                ) if {h} == {h2, h3, h4} and residual in [t.id for t in (left, right) if isinstance(t, ast.Name)]:
                    yield norm


FORMS = (NORMS, find_residual_norms)
