"""Sequences of a model: packed documents, and shards of them on several ranks."""
