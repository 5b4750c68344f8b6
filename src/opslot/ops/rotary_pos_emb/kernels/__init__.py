"""Triton kernels of rotary_pos_emb."""
