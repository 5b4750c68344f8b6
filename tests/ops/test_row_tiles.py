"""Norms on a GPU, whose tiles of rows depend on the width."""

import pytest
import torch

from opslot import KERNEL_REGISTRY
from opslot.slots import InputCase
from opslot.verify.parity import check_kernel

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
WIDTHS = [80, 128, 160, 256, 384, 512, 768, 1024, 1152, 1536, 2048, 2880, 4096, 16384]
# Variants, with their tensors other than `hidden_states`: of its shape, and of a row's.
NORMS = [
    ("layer_norm", "standard", [], ["weight", "bias"]),
    ("rms_norm", "standard", [], ["weight"]),
    ("rms_norm", "weight_offset", [], ["weight"]),
    ("rms_norm", "unweighted", [], []),
    ("rms_norm", "gated", ["gate"], ["weight"]),
    ("rms_norm", "fused_add", ["residual"], ["weight"]),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("op", "variant", "rows", "vectors"), NORMS)
def test_norms_of_all_widths_against_fp64(op, variant, rows, vectors, width, dtype):
    def make(dtype, device, generator):
        def randn(*shape):
            return torch.randn(shape, generator=generator).to(device, dtype)

        shape = (3000, width)
        found = {name: randn(*shape) for name in ("hidden_states", *rows)}
        return {**found, **{name: randn(width) for name in vectors}, "eps": 1e-6}

    case = InputCase(f"3000 rows of {width}", make)
    kernel = KERNEL_REGISTRY.load(op, variant, "triton")
    result = check_kernel(kernel, op, KERNEL_REGISTRY.op(op).variant(variant), case, dtype, "cuda", name="triton")
    assert result.ok, str(result)
