"""Benchmarks of ops and of training steps."""
