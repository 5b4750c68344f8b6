"""Mistral 3."""
