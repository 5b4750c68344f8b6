"""NF4 weights: dequantized as by bitsandbytes, bit for bit."""

import math

import pytest
import torch

from opslot.ops.linear import nf4

bitsandbytes = pytest.importorskip("bitsandbytes")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def quantized(shape, dtype, nested=True, blocksize=64, device="cpu"):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return bitsandbytes.nn.Params4bit(weight, quant_type="nf4", compress_statistics=nested, blocksize=blocksize).to(
        device
    )


def by_definition(packed):
    """Value by value, in float32."""
    state, data = packed.quant_state, packed.data.flatten().tolist()
    indices = [index for byte in data for index in (byte >> 4, byte & 15)][: math.prod(state.shape)]
    scales = state.absmax
    if state.nested:
        inner = state.state2
        groups = torch.arange(len(scales)) // inner.blocksize
        scales = inner.code[scales.long()] * inner.absmax[groups] + state.offset
    blocks = torch.arange(len(indices)) // state.blocksize
    return (state.code[indices] * scales[blocks]).to(state.dtype).view(state.shape)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    ("shape", "dtype", "blocksize"),
    [
        ((130, 128), torch.bfloat16, 64),  # two blocks of scales
        ((33, 96), torch.bfloat16, 64),  # rows that end within a block
        ((7, 3), torch.float16, 64),  # an odd number of values, less than a block
        ((3, 20, 52), torch.float32, 128),
        ((1, 4097), torch.bfloat16, 4096),
    ],
)
def test_equals_the_definition(shape, dtype, blocksize, nested):
    packed = quantized(shape, dtype, nested, blocksize)
    found, expected = nf4.dequantize(packed), by_definition(packed)
    assert found.shape == expected.shape
    assert found.dtype == dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_bitsandbytes(dtype):
    packed = quantized((64, 128), dtype)
    expected = bitsandbytes.functional.dequantize_4bit(packed.data, packed.quant_state)
    assert torch.equal(nf4.dequantize(packed), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1024, 4096), (130, 96), (7, 3), (4, 256, 512)])
def test_equals_the_definition_on_gpus(shape, dtype, nested):
    if DEVICE == "cpu":
        pytest.skip("no GPU")
    packed = quantized(shape, dtype, nested, device="cuda")
    found = nf4.dequantize(packed)
    assert torch.equal(found.cpu(), nf4.dequantize(packed.to("cpu")))
