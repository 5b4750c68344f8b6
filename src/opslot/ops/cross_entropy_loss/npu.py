"""`npu`: the chunked loss on Ascend, where plain torch ops are fused."""

import torch_npu  # noqa: F401  registers the device with torch

from opslot.ops.cross_entropy_loss.chunk_loss import causal, sequence_classification, token_log_probs

__all__ = ["causal", "sequence_classification", "token_log_probs"]
