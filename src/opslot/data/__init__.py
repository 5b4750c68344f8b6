"""Text files to packed batches: sources, an on-demand tokenized corpus, packed samples, and stateful dataloaders."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opslot.data.balance import balance_micro_batches
    from opslot.data.collation import IGNORE_INDEX, collate, collate_padded, count_targets
    from opslot.data.config import DataConfig
    from opslot.data.corpus import TokenCorpus, TokenShard, open_corpus
    from opslot.data.loader import SampleLoader, TokenLoader, evaluation_batches
    from opslot.data.mixture import MixedDataset
    from opslot.data.packing import Documents, PackedDataset
    from opslot.data.sources import find_files
    from opslot.data.split import split_documents
    from opslot.data.tokenizer import load_tokenizer

_MODULES = {
    "IGNORE_INDEX": "collation",
    "DataConfig": "config",
    "Documents": "packing",
    "MixedDataset": "mixture",
    "PackedDataset": "packing",
    "SampleLoader": "loader",
    "TokenCorpus": "corpus",
    "TokenLoader": "loader",
    "TokenShard": "corpus",
    "balance_micro_batches": "balance",
    "collate": "collation",
    "collate_padded": "collation",
    "count_targets": "collation",
    "evaluation_batches": "loader",
    "find_files": "sources",
    "load_tokenizer": "tokenizer",
    "open_corpus": "corpus",
    "split_documents": "split",
}

__all__ = [
    "IGNORE_INDEX",
    "DataConfig",
    "Documents",
    "MixedDataset",
    "PackedDataset",
    "SampleLoader",
    "TokenCorpus",
    "TokenLoader",
    "TokenShard",
    "balance_micro_batches",
    "collate",
    "collate_padded",
    "count_targets",
    "evaluation_batches",
    "find_files",
    "load_tokenizer",
    "open_corpus",
    "split_documents",
]


def __getattr__(name: str) -> Any:
    # Lazy: the configuration is read without torch, so that a command's help is quick.
    if name in _MODULES:
        return getattr(importlib.import_module(f"opslot.data.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'opslot.data' has no attribute {name!r}")
