"""What checkpoints look like: Hugging Face folders, expert layouts, and training checkpoints.

The names are imported when they are used: training checkpoints are listed without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opslot._base.lazy import lazy_names

if TYPE_CHECKING:
    from opslot.checkpoint.adapters import save_adapter
    from opslot.checkpoint.converter import CheckpointTensorConverter, SlicingConverter
    from opslot.checkpoint.experts import ExpertTensorConverter
    from opslot.checkpoint.load import load_weights
    from opslot.checkpoint.save import export_hf, named_weights, save_weights
    from opslot.checkpoint.tensor_slice import TensorSlice

__all__ = [
    "CheckpointTensorConverter",
    "ExpertTensorConverter",
    "SlicingConverter",
    "TensorSlice",
    "export_hf",
    "load_weights",
    "named_weights",
    "save_adapter",
    "save_weights",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".adapters": "save_adapter",
        ".converter": "CheckpointTensorConverter SlicingConverter",
        ".experts": "ExpertTensorConverter",
        ".load": "load_weights",
        ".save": "export_hf named_weights save_weights",
        ".tensor_slice": "TensorSlice",
    },
)
