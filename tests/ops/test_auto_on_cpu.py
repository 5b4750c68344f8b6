"""Plain torch kernels were measured ahead of eager in float32; what is behind in bfloat16 is not chosen there."""

import pytest
import torch

from opslot._base.device import CPU
from opslot.slots import KERNEL_REGISTRY, KernelRequest

MEASURED = {
    ("rms_norm", "standard"): "torch_fused",
    ("rotary_pos_emb", "full"): "torch_fused",
    ("cross_entropy_loss", "causal"): "chunk_loss",
}


@pytest.mark.parametrize(("op", "variant"), MEASURED)
def test_auto_takes_plain_torch_in_float32_alone(op, variant):
    chosen = {
        d: KERNEL_REGISTRY.resolve(KernelRequest(op, variant, CPU, d)).chosen for d in (torch.float32, torch.bfloat16)
    }
    assert chosen == {torch.float32: MEASURED[op, variant], torch.bfloat16: "eager"}
