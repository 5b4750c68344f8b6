"""Text files to packed batches: sources, an on-demand tokenized corpus, packed samples, and stateful dataloaders."""
