"""The Triton kernels of chunk_gated_delta_rule, by what they compute, each beside the function that launches it."""
