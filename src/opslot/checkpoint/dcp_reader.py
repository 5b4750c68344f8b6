"""Reading torch's distributed checkpoints (DCP) without running code.

DCP unpickles `.metadata` and the values that are not tensors without restrictions, so a checkpoint from somebody else
could run anything. Here the metadata may name only the classes that DCP writes, and values go through
`torch.load(weights_only=True)`, as DCP's tensors do.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from opslot._base.errors import CheckpointError

_HINT = "resume from another checkpoint"
_METADATA_CLASSES = (
    "Metadata",
    "StorageMeta",
    "MetadataIndex",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "_MEM_FORMAT_ENCODING",
)
_ALLOWED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}


class MetadataReader(FileSystemReader):
    """DCP's reader of a folder, which unpickles only the classes that DCP writes."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the checkpoint.

        Raises:
            CheckpointError: `.metadata` names another class or function, or is not what DCP writes.
        """
        file = Path(self.path) / ".metadata"
        try:
            metadata = _MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{file} is not the metadata of a checkpoint", found=str(error), hint=_HINT
            ) from error
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise CheckpointError(
                f"{file} is not the metadata of a checkpoint", found=type(metadata).__name__, hint=_HINT
            )
        outside = [info.relative_path for info in metadata.storage_data.values() if not _is_name(info.relative_path)]
        if outside:
            raise CheckpointError(f"{file} refers to files outside of the checkpoint", found=outside[0], hint=_HINT)
        return metadata


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which reads values other than tensors with `weights_only=True`.

    Args:
        partly_read: parameters of which the checkpoint may have more or fewer rows; the rows that both have are loaded.
    """

    def __init__(self, partly_read: Collection[str] = ()) -> None:
        super().__init__()
        self._partly_read = partly_read

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        # DCP compares sizes, and reads where the parts of both sides overlap.
        resized = {
            key: replace(stored, size=self.state_dict[key].size())
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata) and key in self.state_dict and self._is_partly_read(key)
        }
        self.metadata = replace(metadata, state_dict_metadata={**metadata.state_dict_metadata, **resized})

    def _is_partly_read(self, key: str) -> bool:
        return any(key == f"model.{name}" or key.startswith(f"optimizer.state.{name}.") for name in self._partly_read)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{name} is not plain data, and loading it could run code", hint=_HINT) from error
        set_element(self.original_state_dict, self.mappings[name], loaded)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        # The folder that the checkpoint was written to; Python 3.13 names the module otherwise.
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return PurePath
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise CheckpointError(
            "the checkpoint's .metadata refers to code that no checkpoint needs, so it is not loaded",
            found=f"{module}.{name}",
            hint="use checkpoints that opslot wrote, from people you trust",
        )


def _is_name(path: Any) -> bool:
    return isinstance(path, str) and Path(path).name == path
