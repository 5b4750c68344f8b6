"""Attention to a sliding window and to compressed keys (DeepSeek-V4). Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from opslot.patchgen import PatchConfig, Slot
from opslot.patchgen.forms import Match, ModuleView, Reviewed, Skip
from opslot.slots.protocol import (
    ALL_PADDING,
    ATTENTION_OPTIONS,
    KEEPS_SEQUENCES,
    READS_PADDING,
    TAKES_EARLIER_TOKENS,
)

OP, VARIANT = "attention", "compressed"
_CALLS = "opslot.ops.attention.calls"
_COMPRESSES = "self.compressor("

ATTENTION = {
    row.hash: row
    for row in (
        Reviewed(
            "e27a284abb34",
            VARIANT,
            "one key/value head with sinks: a window, and keys that `self.compressor` makes beside it",
            "deepseek_v4",
        ),
        Reviewed("f44f25553185", VARIANT, "the same", "deepseek_v4 before 5.24"),
    )
}
# Fingerprint of a compressor's forward, and where it returns which keys each query sees (`args`) instead of a mask:
# `returns` is what it returns, before or after the statement.
COMPRESSORS = {
    row.hash: row
    for row in (
        Reviewed("a1bac9f1ea61", "indices", "keys that an indexer selects", "deepseek_v4"),
        Reviewed("c7ef5c7b6b10", "indices", "keys that an indexer selects", "deepseek_v4 before 5.17"),
        Reviewed("b1d0b0f8fac4", "counts", "all earlier keys", "deepseek_v4"),
        Reviewed("28ad000bb5d0", "counts", "all earlier keys", "deepseek_v4 before 5.17"),
    )
}
# Of a tensor [B, S, ...].
_LAST = "{}[:, -position_ids.shape[1] :]"
_IF_BOUND = "if takes_selected_keys(self.rotary_emb.config):\n    return compressed_kv, "


def find_compressed_attention(module: ModuleView) -> Iterator[Match | Skip]:
    """Attention classes with a compressor, and the classes of their compressors."""
    for name, forward in module.methods():
        text = module.text(forward)
        if "ALL_ATTENTION_FUNCTIONS" not in text or _COMPRESSES not in text:
            continue
        compressors = dict(_compressors(module))
        unknown = [owner for owner, row in compressors.items() if row is None]
        if module.fingerprint(forward) not in ATTENTION:
            yield Skip(name, OP, "attends to compressed keys in another way than the reviewed forms")
        elif unknown or not compressors:
            yield Skip(name, OP, f"gets compressed keys from {unknown[0] if unknown else 'no class'}, not reviewed")
        else:
            kinds = {owner: row.variant for owner, row in compressors.items() if row is not None}
            indexers = [owner for owner, _ in module.methods() if owner.endswith("Indexer")]
            yield Match(name, OP, VARIANT, partial(_write, name, kinds, indexers))


def _compressors(module: ModuleView) -> Iterator[tuple[str, Reviewed | None]]:
    for name, forward in module.methods():
        if name.endswith("Compressor"):
            yield name, COMPRESSORS.get(module.fingerprint(forward) or "")


def _write(name: str, compressors: Mapping[str, str], indexers: list[str], patch: PatchConfig) -> None:
    """Declare the attention of class `name`, and pass it which keys each query sees instead of a mask of them."""
    patch.slot_config([name], Slot(OP, VARIANT), depends=["eager_attention_forward"])
    options = {"sliding_window": "sliding_window", "s_aux": "sinks", "dropout": "attention_dropout"}
    patch.set_attribute(name, ATTENTION_OPTIONS, (VARIANT, options))
    # Padding is compressed too, so the hidden states there reach other tokens.
    patch.set_attribute(name, READS_PADDING, ALL_PADDING)
    # Also layers without a compressor run once for each document: masks may not separate documents, as with the
    # cache that the model always makes in Transformers 5.9.
    patch.set_attribute(name, KEEPS_SEQUENCES, f"{name} has layers that compress keys of the sequence")
    forward = f"{name}.forward"
    patch.insert_after(
        forward,
        "kv = torch.cat([kv, compressed_kv], dim=2)",
        "kwargs |= selected_keys(self.config, compressed_kv, block_bias)",
    )
    # A padding mask stays one of the keys of tokens.
    is_mask = "isinstance(attention_mask, torch.Tensor)"
    patch.replace(forward, is_mask, f"({is_mask} and attention_mask.dim() == 4)")
    patch.add_import(_CALLS, ["selected_keys", "takes_selected_keys"])
    _take_earlier_tokens(name, indexers, patch)
    for compressor, kind in compressors.items():
        scope = f"{compressor}.forward"
        if kind == "indices":
            patch.insert_after(scope, "top_k_indices = self.indexer($*args)", f"{_IF_BOUND}top_k_indices")
        else:
            counts = "(position_ids + 1) // self.compress_rate"
            patch.insert_before(scope, "entry_indices = torch.arange($*args)", f"{_IF_BOUND}{counts}")


def _take_earlier_tokens(name: str, indexers: list[str], patch: PatchConfig) -> None:
    """Let hidden states and cosines have tokens before those of position_ids, whose keys alone are computed."""
    patch.set_attribute(name, TAKES_EARLIER_TOKENS, ("hidden_states", "position_embeddings"))
    forward = f"{name}.forward"
    for pattern, replacement in (
        ("self.q_a_proj(hidden_states)", f"self.q_a_proj({_LAST.format('hidden_states')})"),
        (
            "self.q_b_proj(q_residual).view(*hidden_shape)",
            "self.q_b_proj(q_residual).view(*q_residual.shape[:-1], -1, self.head_dim)",
        ),
        (
            "q = apply_rotary_pos_emb(q, cos, sin)",
            f"q = apply_rotary_pos_emb(q, {_LAST.format('cos')}, {_LAST.format('sin')})",
        ),
    ):
        patch.replace(forward, pattern, replacement)
    patch.insert_after(
        forward,
        "kv = apply_rotary_pos_emb(kv, cos, sin)",
        f"input_shape, cos, sin = q_residual.shape[:-1], {_LAST.format('cos')}, {_LAST.format('sin')}",
    )
    for indexer in indexers:
        patch.insert_after(
            f"{indexer}.forward",
            "gate = self.gate_proj(hidden_states)",
            f"hidden_states, seq_len = {_LAST.format('hidden_states')}, position_ids.shape[1]",
        )


FORMS = (find_compressed_attention,)
