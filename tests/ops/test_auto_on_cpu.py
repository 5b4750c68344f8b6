"""On CPU, plain torch kernels are faster than eager in float32 only; `auto` does not select them in bfloat16."""

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
def test_auto_selects_plain_torch_in_float32_only(op, variant):
    chosen = {
        d: KERNEL_REGISTRY.resolve(KernelRequest(op, variant, CPU, d)).chosen for d in (torch.float32, torch.bfloat16)
    }
    assert chosen == {torch.float32: MEASURED[op, variant], torch.bfloat16: "eager"}
