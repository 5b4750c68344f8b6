"""Text files to packed batches: sources, an on-demand tokenized corpus, packed samples, and stateful dataloaders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opslot._base.lazy import lazy_names

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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".balance": "balance_micro_batches",
        ".collation": "IGNORE_INDEX collate collate_padded count_targets",
        ".config": "DataConfig",
        ".corpus": "TokenCorpus TokenShard open_corpus",
        ".loader": "SampleLoader TokenLoader evaluation_batches",
        ".mixture": "MixedDataset",
        ".packing": "Documents PackedDataset",
        ".sources": "find_files",
        ".split": "split_documents",
        ".tokenizer": "load_tokenizer",
    },
)
