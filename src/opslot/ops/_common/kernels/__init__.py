"""Triton functions and kernels that several ops use."""
