"""Helpers for all packages: errors, logging, properties of the machine."""
