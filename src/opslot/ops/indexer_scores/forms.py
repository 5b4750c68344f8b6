"""Transformers code that indexer_scores replaces. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

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
_WEIGHTS_OF_HEADS = "self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float() * (self.n_heads**-0.5)"
# Of Qwen4: without a slot, a loop over all queries.
_SELECTS_POOLS = """\
if {kernel} is not None or selects_bits(attention_mask):
    with torch.no_grad():
        visible = visible_by_mask(attention_mask)
        raw_keys, full_cos, full_sin = (keys_of_all_ranks(x, visible) for x in (raw_keys, full_cos, full_sin))
        pools = pools_of(visible, raw_keys.shape[1], self.compress_ratio)
        pool_keys = self.k_layernorm(pools.gather(raw_keys).float().mean(dim=2).to(raw_keys.dtype))
        pool_keys = apply_rotary_pos_emb(
            pool_keys.unsqueeze(2), cos=pools.first(full_cos), sin=pools.first(full_sin), unsqueeze_dim=2
        ).squeeze(2)
        scale = 1 / math.sqrt(self.index_head_dim)
        bits = select_pools({kernel}, q, pool_keys, None, scale, pools, self.block_topk)
    return bits if selects_bits(attention_mask) else dense_mask(bits, raw_keys.shape[1])"""
# Of GLM-5.3, whose mask is one of padding.
_SELECTS_GATED_POOLS = f"""\
if selects_bits(visible):
    if packed_states.shape[1] != seq_len:
        shown = packed_states[..., -1].bool()
        visible = Visible(
            None, self.get_visible_tokens(valid_keys=shown, q_length=seq_len, current_length=current_length)
        )
    packed_states = keys_of_all_ranks(packed_states, visible)
    pools = pools_of(visible, packed_states.shape[1], self.index_kpool)
    pooled, gates, _ = pools.gather(packed_states).split([self.head_dim, self.head_dim, 1], dim=-1)
    shares = (gates.float() + self.index_kpool_compress_ape.float()).softmax(dim=2).to(pooled.dtype)
    weights = {_WEIGHTS_OF_HEADS}
    pool_keys, top = (shares * pooled).sum(dim=2), self.index_topk // self.index_kpool
    with_tail = self.index_kpool_always_select_tail
    return select_pools({{kernel}}, q, pool_keys, weights, self.softmax_scale, pools, top, with_tail)"""
# The statements of MiniMax-M3.
_BLOCK_SCORES = """\
scores = torch.matmul(idx_q.float(), idx_k.float().transpose(-1, -2))
k_positions = torch.arange(k_len, device=idx_q.device)
token_future = k_positions[None, None, None, :] > position_ids[:, None, :, None]
scores = scores.masked_fill(token_future, float('-inf'))
if pad:
    scores = F.pad(scores, (0, pad), value=float('-inf'))
scores = scores.view(batch, self.num_heads, q_len, num_key_blocks, self.block_size)
block_scores = scores.amax(dim=-1)"""
_BLOCK_SCORES_BY_KERNEL = """\
if {kernel} is None:
    $match
else:
    blocks = blocks_before(position_ids, k_len, self.block_size)
    block_scores = {kernel}(idx_q.transpose(1, 2), idx_k.squeeze(1), *blocks)"""
_SELECTS_BLOCKS = """\
if selects_bits(position_ids):
    queries, keys = idx_q.transpose(1, 2), idx_k.squeeze(1)
    top = self.topk_blocks
    return select_blocks({kernel}, queries, keys, position_ids, self.block_size, self.local_blocks, top)"""


@dataclass(frozen=True)
class _Selection:
    """An indexer whose selection was reviewed as a whole.

    Attributes:
        hashes: fingerprints of its methods.
        variant: of the slot.
        inserted: statements that call the slot, before the statement at their beginning.
        replaced: statements, and what replaces them.
        imports: what these call, by module.
    """

    hashes: Mapping[str, str]
    variant: str
    inserted: tuple[tuple[str, str], ...]
    replaced: tuple[tuple[str, str], ...]
    imports: Mapping[str, tuple[str, ...]]

    def matches(self, module: ModuleView, name: str) -> bool:
        return all(module.fingerprint(f"{name}.{method}") == hash_ for method, hash_ in self.hashes.items())


_SELECTIONS = (
    # qwen4_exp
    _Selection(
        {"forward": "431f56e0937c"},
        "standard",
        (("visible_token_indices = $mask", _SELECTS_POOLS),),
        (),
        {
            "opslot.ops.attention.calls": ("dense_mask", "selects_bits", "visible_by_mask"),
            "opslot.ops.attention.indexed": ("keys_of_all_ranks",),
            "opslot.ops.attention.pools": ("pools_of", "select_pools"),
        },
    ),
    # glm5_next
    _Selection(
        {
            "forward": "55cb7c98a5a7",
            "get_visible_tokens": "d9a5038ace9c",
            "get_pooled_states": "4e45b5a76f63",
            "append_visible_tail": "ea9ef32ca217",
        },
        "standard",
        (
            (
                "batch_size, seq_len = hidden_states.shape[:2]",
                "visible, attention_mask = attention_mask, mask_of(attention_mask)",
            ),
            ("valid_keys = packed_states[..., -1].bool()", _SELECTS_GATED_POOLS),
        ),
        ((_STATEMENTS["pool_keys", _SCALE], _SCORES_ALONE.replace("{arguments}", f"q, pool_keys, weights, {_SCALE}")),),
        {
            "opslot.ops.attention.calls": ("mask_of", "selects_bits"),
            "opslot.ops.attention.indexed": ("keys_of_all_ranks",),
            "opslot.ops.attention.pools": ("pools_of", "select_pools"),
            "opslot.ops.attention.visible": ("Visible",),
        },
    ),
    # minimax_m3_vl
    _Selection(
        {"forward": "0012b07cf4c6", "build_block_mask": "4ebf67bfe808"},
        "block_max",
        (("k_len = idx_k.shape[2]", _SELECTS_BLOCKS),),
        ((_BLOCK_SCORES, _BLOCK_SCORES_BY_KERNEL),),
        {
            "opslot.ops.attention.calls": ("selects_bits",),
            "opslot.ops.attention.pools": ("blocks_before", "select_blocks"),
        },
    ),
)


def _selection(module: ModuleView, name: str) -> _Selection | None:
    return next((found for found in _SELECTIONS if found.matches(module, name)), None)


# An indexer that computes scores itself.
_INLINE = re.compile(r"\bscores = torch\.(matmul|einsum)\(")


def selects_keys(module: ModuleView, name: str) -> bool:
    """Whether an indexer returns bits of the selected keys where its mask is that of a kernel of attention."""
    if _selection(module, name) is not None:
        return True
    return _statements(module, name) is not None and module.count(f"{name}.forward", _SELECTS) == 1


def _statements(module: ModuleView, name: str) -> tuple[str, str] | None:
    """The keys and the factor of the statements that compute the scores of a class; None without such statements."""
    if "index_scores" not in module.text(f"{name}.forward"):
        return None
    return next((key for key, text in _STATEMENTS.items() if module.count(f"{name}.forward", text) == 1), None)


def find_indexer_scores(module: ModuleView) -> Iterator[Match | Skip]:
    """Indexers that sum the weighted scores of their heads."""
    for name, _ in module.methods():
        found, selection = _statements(module, name), _selection(module, name)
        if selection is not None:
            yield Match(name, OP, selection.variant, partial(_write_selection, name, selection))
        elif found is not None:
            yield Match(name, OP, _SLOT.variant, partial(_write, name, found, selects_keys(module, name)))
        elif name.endswith("Indexer") and _INLINE.search(module.text(f"{name}.forward")):
            yield Skip(name, OP, "scores keys in another way than the reviewed forms")


def _write(name: str, statements: tuple[str, str], selects: bool, patch: PatchConfig) -> None:
    """Route the statements of class `name` through the slot."""
    keys, factor = statements
    text = _WITH_KERNELS if selects else _SCORES_ALONE
    replacement = text.format(kernel=_KERNEL, arguments=f"q, {keys}, weights, {factor}")
    patch.replace(f"{name}.forward", _STATEMENTS[statements], replacement, slot=_SLOT)
    if selects:
        patch.add_import("opslot.ops.attention.calls", ["selects_bits"])
        patch.add_import("opslot.ops.attention.indexed", ["select_keys"])


def _write_selection(name: str, selection: _Selection, patch: PatchConfig) -> None:
    """Route the scores of class `name` through the slot, and select as a kernel of attention takes it."""
    forward, slot = f"{name}.forward", Slot(OP, selection.variant)
    inserted = [(anchor, f"{statements}\n$match") for anchor, statements in selection.inserted]
    for pattern, text in (*inserted, *selection.replaced):
        declared = slot if "{kernel}" in text else None
        patch.replace(forward, pattern, text.replace("{kernel}", _KERNEL), slot=declared)
    for module, names in selection.imports.items():
        patch.add_import(module, names)


FORMS = (
    find_indexer_scores,
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
