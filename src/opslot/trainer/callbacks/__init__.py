"""Callbacks: evaluation, metrics, progress, checkpoints and the final export."""
