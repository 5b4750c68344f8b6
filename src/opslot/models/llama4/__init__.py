"""Llama 4."""
