"""The GEMMs of one dense layer at the GPU's power limit, which bound a dense training step.

    python benchmarks/gemm.py [--output FILE]

Times the GEMMs of a Qwen3-8B layer (16384 tokens, bf16, random data; forward and both gradients) in the order of a
step, on a warm GPU, with cuBLAS and with several tiles of quack's persistent kernels, and reads the GPU's clock and
power. Where several libraries reach the same FLOP/s at the power limit, no other bf16 kernel makes the step faster.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from opslot.bench.files import OutputFiles
from opslot.bench.result import Environment, Result, Run, Value

TOKENS, HIDDEN, INTERMEDIATE, KEY_VALUE = 16384, 4096, 12288, 1024
# Weights [out, in] of a layer, and how many of each.
WEIGHTS = {(HIDDEN, HIDDEN): 2, (KEY_VALUE, HIDDEN): 2, (INTERMEDIATE, HIDDEN): 2, (HIDDEN, INTERMEDIATE): 1}
# The fastest of a dozen of quack's (tile_m, tile_n, cluster_m, cluster_n, pingpong).
TILES = [(128, 256, 2, 1, False), (128, 192, 2, 1, True), (256, 128, 1, 2, False)]
Gemm = Callable[[Tensor, Tensor], Tensor]


def operands() -> Iterator[tuple[int, Tensor, Tensor]]:
    """(how often a layer has it, a, b) of every GEMM a @ b."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    inputs, gradients = ({n: randn(TOKENS, n) for n in {n for pair in WEIGHTS for n in pair}} for _ in range(2))
    for (out, width), count in WEIGHTS.items():
        weight = randn(out, width)
        yield count, inputs[width], weight.T
        yield count, gradients[out], weight
        yield count, gradients[out].T, inputs[width]


def libraries() -> dict[str, Gemm]:
    found: dict[str, Gemm] = {"cuBLAS": torch.matmul}
    try:
        from quack.gemm_config import GemmConfig
        from quack.gemm_interface import gemm_tuned
    except ImportError:
        return found

    def quack(config: object, a: Tensor, b: Tensor) -> Tensor:
        out = a.new_empty(a.shape[0], b.shape[1])
        gemm_tuned.fn(a, b, out, config=config)
        return out

    for m, n, cluster_m, cluster_n, pingpong in TILES:
        config = GemmConfig(m, n, None, None, pingpong, False, cluster_m, cluster_n)
        found[f"quack {m}x{n}"] = functools.partial(quack, config)
    return found


def heat(seconds: float) -> None:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


def clock_and_power() -> tuple[float, float]:
    """MHz and watts of the first GPU."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "--id=0"]
    clock, power = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    return float(clock), float(power)


def measure(name: str, gemm: Gemm, layer: list[tuple[int, Tensor, Tensor]], repeat: int) -> list[Value]:
    """Time of the layer, and the GPU's clock and power while its queue is full."""

    def run() -> None:
        for count, a, b in layer:
            for _ in range(count):
                gemm(a, b)

    run()
    heat(1.0)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeat):
        run()
    stop.record()
    clock, power = clock_and_power()
    torch.cuda.synchronize()
    ms = start.elapsed_time(stop) / repeat
    flops = sum(2 * count * a.shape[0] * a.shape[1] * b.shape[1] for count, a, b in layer)
    return [
        Value(f"{name}: one layer", ms, "ms"),
        Value(f"{name}: rate", flops / ms / 1e9, "TFLOP/s"),
        Value(f"{name}: clock", clock, "MHz"),
        Value(f"{name}: power", power, "W"),
    ]


def relative_error(gemm: Gemm) -> float:
    """Against fp64 on random data."""
    a, b = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    expected = a.double() @ b.double()
    return ((gemm(a, b).double() - expected).norm() / expected.norm()).item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="write the result as JSON")
    parser.add_argument("--commit", help="commit to record where there is no git")
    parser.add_argument("--repeat", type=int, default=40)
    options = parser.parse_args()
    files = OutputFiles(options.output)
    torch.manual_seed(0)
    layer = list(operands())
    values: list[Value] = []
    for name, gemm in libraries().items():
        error = relative_error(gemm)
        if error > 4e-3:
            print(f"{name}: WRONG, relative error {error:.1e}")
            return 1
        values += measure(name, gemm, layer, options.repeat)
    for v in values:
        print(f"{v.name:30} {v.value:8.1f} {v.unit}")
    run = Run("python benchmarks/gemm.py", Environment.current("cuda", options.commit), values=values)
    files.write(Result("benchmarks/gemm.py", [run]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
