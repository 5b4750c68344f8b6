"""Triton reads this when it is imported: its kernels run on the CPU here, through the interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
