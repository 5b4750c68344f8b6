"""What checkpoints look like: Hugging Face folders, expert layouts, and training checkpoints.

The names are imported when they are used: training checkpoints are listed without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opslot._base.lazy import lazy_names

if TYPE_CHECKING:
    from opslot.checkpoint.adapters import save_adapter
    from opslot.checkpoint.convert import convert_folder
    from opslot.checkpoint.converter import CheckpointTensorConverter, SlicingConverter
    from opslot.checkpoint.experts import LAYOUTS, ExpertTensorConverter
    from opslot.checkpoint.folder import read_folder
    from opslot.checkpoint.initialize import initialize_weights
    from opslot.checkpoint.load import LoadReport, load_weights
    from opslot.checkpoint.save import export_hf, named_weights, save_weights
    from opslot.checkpoint.tensor_slice import TensorSlice, local_ranges

__all__ = [
    "LAYOUTS",
    "CheckpointTensorConverter",
    "ExpertTensorConverter",
    "LoadReport",
    "SlicingConverter",
    "TensorSlice",
    "convert_folder",
    "export_hf",
    "initialize_weights",
    "load_weights",
    "local_ranges",
    "named_weights",
    "read_folder",
    "save_adapter",
    "save_weights",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".adapters": "save_adapter",
        ".convert": "convert_folder",
        ".converter": "CheckpointTensorConverter SlicingConverter",
        ".experts": "LAYOUTS ExpertTensorConverter",
        ".folder": "read_folder",
        ".initialize": "initialize_weights",
        ".load": "LoadReport load_weights",
        ".save": "export_hf named_weights save_weights",
        ".tensor_slice": "TensorSlice local_ranges",
    },
)
