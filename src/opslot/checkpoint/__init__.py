"""Checkpoints in Hugging Face layout: loaded into any model, sharded or not, saved and converted."""

from opslot.checkpoint.convert import convert_folder
from opslot.checkpoint.converter import CheckpointTensorConverter, PlacingConverter
from opslot.checkpoint.experts import LAYOUTS, ExpertTensorConverter
from opslot.checkpoint.folder import read_folder
from opslot.checkpoint.initialize import initialize_weights
from opslot.checkpoint.load import LoadReport, load_weights
from opslot.checkpoint.placement import Placement, local_ranges
from opslot.checkpoint.save import export_hf, save_weights

__all__ = [
    "LAYOUTS",
    "CheckpointTensorConverter",
    "ExpertTensorConverter",
    "LoadReport",
    "Placement",
    "PlacingConverter",
    "convert_folder",
    "export_hf",
    "initialize_weights",
    "load_weights",
    "local_ranges",
    "read_folder",
    "save_weights",
]
