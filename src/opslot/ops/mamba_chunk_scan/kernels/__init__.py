"""The Triton kernels of mamba_chunk_scan, by what they compute, each beside the function that launches it."""
