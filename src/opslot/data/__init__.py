"""Text files to packed batches: sources, a tokenized corpus, rows, and a loader that resumes exactly."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opslot.data.balance import share_out
    from opslot.data.config import DataConfig
    from opslot.data.corpus import TokenCorpus, tokenize_files
    from opslot.data.loader import RowLoader, TokenLoader, evaluation_batches
    from opslot.data.packing import IGNORE_INDEX, PackedRows, collate, count_targets, split_documents
    from opslot.data.sources import find_files, list_problems, read_documents
    from opslot.data.tokenizer import load_tokenizer

_HOMES = {
    "IGNORE_INDEX": "packing",
    "DataConfig": "config",
    "PackedRows": "packing",
    "RowLoader": "loader",
    "TokenCorpus": "corpus",
    "TokenLoader": "loader",
    "collate": "packing",
    "count_targets": "packing",
    "evaluation_batches": "loader",
    "find_files": "sources",
    "list_problems": "sources",
    "load_tokenizer": "tokenizer",
    "read_documents": "sources",
    "share_out": "balance",
    "split_documents": "packing",
    "tokenize_files": "corpus",
}

__all__ = [
    "IGNORE_INDEX",
    "DataConfig",
    "PackedRows",
    "RowLoader",
    "TokenCorpus",
    "TokenLoader",
    "collate",
    "count_targets",
    "evaluation_batches",
    "find_files",
    "list_problems",
    "load_tokenizer",
    "read_documents",
    "share_out",
    "split_documents",
    "tokenize_files",
]


def __getattr__(name: str) -> Any:
    # The configuration is read without torch, so that a command's help is instant.
    if name in _HOMES:
        return getattr(importlib.import_module(f"opslot.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'opslot.data' has no attribute {name!r}")
