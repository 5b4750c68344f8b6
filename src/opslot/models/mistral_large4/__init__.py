"""Mistral Large 4."""
