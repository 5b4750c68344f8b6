"""Time of dequantizing NF4 weights on one GPU, beside bitsandbytes: prints microseconds and GB/s read and written.

python benchmarks/nf4.py [--sweep]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import bitsandbytes
import torch

from opslot.ops.linear.dequantize import dequantize

# Attention, MLP and 128 experts, of Qwen3-8B and Qwen3-30B-A3B.
SHAPES = [(4096, 4096), (12288, 4096), (128, 1536, 2048)]
# Bytes that a program reads, and warps.
CONFIGURATIONS = [(size, warps) for size in (1024, 2048, 4096, 8192) for warps in (2, 4, 8)]


def microseconds(function: Callable[[], Any], repeats: int = 50) -> float:
    """Median time on the GPU; a buffer larger than its L2 cache is overwritten before each call."""
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return sorted(times)[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="all configurations of the kernel")
    sweep = parser.parse_args().sweep
    for shape in SHAPES:
        weight = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        expected = bitsandbytes.functional.dequantize_4bit(packed, state)
        size = packed.nbytes + state.absmax.nbytes + expected.nbytes
        rows: dict[str, Callable[[], Any]] = {
            "bitsandbytes": lambda packed=packed, state=state: bitsandbytes.functional.dequantize_4bit(packed, state),
            "opslot": lambda packed=packed, state=state: dequantize(packed, state),
        }
        for size_of_program, warps in CONFIGURATIONS if sweep else ():
            rows[f"opslot, {size_of_program} bytes, {warps} warps"] = (
                lambda packed=packed, state=state, options=(size_of_program, warps): dequantize(packed, state, *options)
            )
        for name, function in rows.items():
            assert torch.equal(function(), expected), name
            time = microseconds(function)
            print(f"{list(shape)!s:20} {name:32} {time:8.1f} us {size / time / 1000:8.0f} GB/s", flush=True)


if __name__ == "__main__":
    main()
