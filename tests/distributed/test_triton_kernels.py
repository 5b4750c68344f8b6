"""The kernel that sums copied gradients, compared with plain torch."""

import pytest
import torch

from opslot.distributed.copy_engine import sum_parts as plain
from opslot.distributed.triton_kernels import sum_parts

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("sent", "summed"), [(BF16, F32), (F32, F32), (F64, F64), (BF16, BF16)])
@pytest.mark.parametrize(("ranks", "length"), [(2, 5), (4, 4096), (3, 9001), (8, 1), (2, 0)])
def test_shard_of_every_rank_is_added_once(device, sent, summed, ranks, length):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    generator = torch.Generator().manual_seed(length)
    given = torch.randn(ranks, length, generator=generator, dtype=F64).to(sent)
    fp64 = given.double().sum(0).to(summed).double()
    for rank in range(ranks):
        parts = given.to(device, copy=True)
        parts[rank] = torch.nan
        own = given[rank].to(device)
        found = torch.full((length,), torch.nan, dtype=summed, device=device)
        sum_parts(own, parts, rank, found)
        torch.testing.assert_close(found.double().cpu(), fp64, rtol=2 * torch.finfo(summed).eps, atol=1e-6)
        expected = torch.empty_like(found)
        plain(own, parts, rank, expected)
        torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(summed).eps, atol=1e-6)
