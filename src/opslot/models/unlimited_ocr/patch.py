"""Unlimited-OCR: without a cache every token is one of the reference, so its sliding windows limit nothing.

Transformers makes a mask of two patterns there, which only a dense mask can express; it equals the causal one.
"""

from __future__ import annotations

from opslot.patchgen import PatchConfig

patch = PatchConfig("transformers.models.unlimited_ocr.modeling_unlimited_ocr")
patch.replace(
    "UnlimitedOcrTextModel.forward",
    "create_reference_sliding_window_causal_mask($*arguments)",
    "reference_window_mask(create_causal_mask, create_reference_sliding_window_causal_mask, $*arguments)",
)
patch.add_import("opslot.models.unlimited_ocr.masks", ["reference_window_mask"])
