"""Outputs of Llama 4's language model, as the model with images around it reads them."""

from __future__ import annotations

from typing import Any


def with_image_outputs(outputs: Any, read_by: type) -> Any:
    """The language model's outputs, with the attribute image_outputs where `read_by` is made from it.

    Transformers 5.24 reads it from outputs that lack it, so that every forward raises.
    """
    needed = "image_outputs" in getattr(read_by, "__dataclass_fields__", {}) and not isinstance(outputs, tuple)
    if needed and not hasattr(outputs, "image_outputs"):
        outputs.image_outputs = None
    return outputs
