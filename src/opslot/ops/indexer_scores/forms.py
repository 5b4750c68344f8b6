"""Transformers code that indexer_scores replaces. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from opslot.patchgen import PatchConfig, Slot
from opslot.patchgen.forms import Match, MethodForms, ModuleView, Reviewed, Skip

OP = "indexer_scores"
_SLOT = Slot(OP)
_KERNEL = f"self.{_SLOT.attribute}"
_PRODUCTS = "scores = torch.matmul(q.float(), {keys}.transpose(-1, -2).float().unsqueeze(1))"
_WEIGHTS = "weights = $weights"
_WEIGHTED = "index_scores = torch.matmul(weights.unsqueeze(-2), scores).squeeze(-2)"
_SCALE = "self.softmax_scale"
_OF_TOKENS, _OF_POOLS, _OF_COMPRESSED = (_PRODUCTS.format(keys=keys) for keys in ("k", "pool_keys", "compressed_kv"))
# Statements that compute the scores, by the keys and the factor that are arguments of the slot.
_STATEMENTS = {
    key: "\n".join(statements)
    for key, statements in {
        # deepseek_v32, glm_moe_dsa, axk2, dots3_note, mistral_large4
        ("k", _SCALE): (f"{_OF_TOKENS} * {_SCALE}", "scores = F.relu(scores)", _WEIGHTS, _WEIGHTED),
        # hy_v4, which multiplies the weights by it
        ("k", "1.0"): (_OF_TOKENS, "scores = F.relu(scores)", _WEIGHTS, _WEIGHTED),
        # glm5_next
        ("pool_keys", _SCALE): (_OF_POOLS, f"scores = F.relu(scores * {_SCALE})", _WEIGHTS, _WEIGHTED),
        # deepseek_v4 before 5.17
        ("compressed_kv", _SCALE): (
            _OF_COMPRESSED,
            f"scores = F.relu(scores) * {_SCALE}",
            _WEIGHTS,
            "index_scores = (scores * weights.unsqueeze(-1)).sum(dim=2)",
        ),
    }.items()
}
# How an indexer selects by its scores; with the mask of a kernel of attention, it returns bits instead.
_SELECTS = """\
if attention_mask.dtype == torch.bool:
    index_scores = index_scores.masked_fill(~attention_mask, float('-inf'))
else:
    index_scores = index_scores + attention_mask
topk = min(self.index_topk, index_scores.shape[-1])
return index_scores.topk(topk, dim=-1).indices.to(torch.int32)"""
_WITH_KERNELS = """\
if {kernel} is None and not selects_bits(attention_mask):
    $match
else:
    weights = $weights
    if selects_bits(attention_mask):
        return select_keys({kernel}, {arguments}, attention_mask, self.index_topk)
    index_scores = {kernel}({arguments})
"""
_SCORES_ALONE = """\
if {kernel} is None:
    $match
else:
    weights = $weights
    index_scores = {kernel}({arguments})
"""
_CALLS = "opslot.ops.attention.calls"
# An indexer that computes scores itself.
_INLINE = re.compile(r"\bscores = torch\.(matmul|einsum)\(")


def selects_keys(module: ModuleView, name: str) -> bool:
    """Whether an indexer returns bits of the selected keys where its mask is that of a kernel of attention."""
    return _statements(module, name) is not None and module.count(f"{name}.forward", _SELECTS) == 1


def _statements(module: ModuleView, name: str) -> tuple[str, str] | None:
    """The keys and the factor of the statements that compute the scores of a class; None without such statements."""
    if "index_scores" not in module.text(f"{name}.forward"):
        return None
    return next((key for key, text in _STATEMENTS.items() if module.count(f"{name}.forward", text) == 1), None)


@dataclass(frozen=True)
class IndexerScores:
    """Indexers that sum the weighted products of their heads."""

    def find(self, module: ModuleView) -> Iterator[Match | Skip]:
        for name, _ in module.methods():
            found = _statements(module, name)
            if found is not None:
                yield Match(name, OP, _SLOT.variant, _Write(name, found, selects_keys(module, name)))
            elif name.endswith("Indexer") and _INLINE.search(module.text(f"{name}.forward")):
                yield Skip(name, OP, "scores keys in another way than the reviewed forms")


@dataclass(frozen=True)
class _Write:
    """Routes the statements of class `name` through the slot."""

    name: str
    statements: tuple[str, str]
    selects: bool

    def __call__(self, patch: PatchConfig) -> None:
        keys, factor = self.statements
        text = _WITH_KERNELS if self.selects else _SCORES_ALONE
        replacement = text.format(kernel=_KERNEL, arguments=f"q, {keys}, weights, {factor}")
        patch.replace(f"{self.name}.forward", _STATEMENTS[self.statements], replacement, slot=_SLOT)
        if self.selects:
            patch.add_import(_CALLS, ["select_keys", "selects_bits"])


FORMS = (
    IndexerScores(),
    MethodForms(
        op=OP,
        rows=(
            Reviewed(
                "25e5b283dcf2",
                "standard",
                "sum over heads of relu(q k) times a scale and the weights",
                "deepseek_v4",
                args="{0}, {1}, self.weights_proj({2}).float() * self.weights_scaling, self.softmax_scale",
            ),
        ),
        helper="weights",
        candidate=lambda name, text: name.endswith("IndexerScorer"),
        reason="scores keys in another way than the reviewed forms",
    ),
)
