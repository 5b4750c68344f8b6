"""What checkpoints look like: Hugging Face folders, expert layouts, and training checkpoints.

The names are imported when they are used: training checkpoints are listed without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

_MODULES = {
    "LAYOUTS": "experts",
    "CheckpointTensorConverter": "converter",
    "ExpertTensorConverter": "experts",
    "LoadReport": "load",
    "TensorSlice": "tensor_slice",
    "SlicingConverter": "converter",
    "convert_folder": "convert",
    "export_hf": "save",
    "initialize_weights": "initialize",
    "load_weights": "load",
    "local_ranges": "tensor_slice",
    "named_weights": "save",
    "read_folder": "folder",
    "save_adapter": "adapters",
    "save_weights": "save",
}

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


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
