"""Text files to packed batches: sources, a corpus tokenized as it is needed, rows, and loaders that resume exactly."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opslot.data.balance import share_out
    from opslot.data.config import DataConfig
    from opslot.data.corpus import TokenBlock, TokenCorpus, open_corpus
    from opslot.data.loader import RowLoader, TokenLoader, evaluation_batches
    from opslot.data.packing import IGNORE_INDEX, Documents, PackedRows, collate, count_targets
    from opslot.data.sources import find_files, read_documents
    from opslot.data.split import split_documents
    from opslot.data.tokenizer import load_tokenizer

_HOMES = {
    "IGNORE_INDEX": "packing",
    "DataConfig": "config",
    "Documents": "packing",
    "PackedRows": "packing",
    "RowLoader": "loader",
    "TokenBlock": "corpus",
    "TokenCorpus": "corpus",
    "TokenLoader": "loader",
    "collate": "packing",
    "count_targets": "packing",
    "evaluation_batches": "loader",
    "find_files": "sources",
    "load_tokenizer": "tokenizer",
    "open_corpus": "corpus",
    "read_documents": "sources",
    "share_out": "balance",
    "split_documents": "split",
}

__all__ = [
    "IGNORE_INDEX",
    "DataConfig",
    "Documents",
    "PackedRows",
    "RowLoader",
    "TokenBlock",
    "TokenCorpus",
    "TokenLoader",
    "collate",
    "count_targets",
    "evaluation_batches",
    "find_files",
    "load_tokenizer",
    "open_corpus",
    "read_documents",
    "share_out",
    "split_documents",
]


def __getattr__(name: str) -> Any:
    # The configuration is read without torch, so that a command's help is instant.
    if name in _HOMES:
        return getattr(importlib.import_module(f"opslot.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'opslot.data' has no attribute {name!r}")
