"""Unlimited-OCR: without a cache every token is one of the reference, so its sliding windows limit nothing.

Transformers makes a mask of two patterns there, which only a dense mask can express; it equals the causal one.
"""

from __future__ import annotations

from opslot.patchgen import PatchConfig

patch = PatchConfig("transformers.models.unlimited_ocr.modeling_unlimited_ocr")
patch.replace(
    "UnlimitedOcrTextModel.forward",
    "create_reference_sliding_window_causal_mask($*arguments)",
    # Dense, as Transformers' own, where no kernel replaces it.
    "(create_causal_mask($*arguments, allow_is_causal_skip=False) if past_key_values is None else $match)",
)
