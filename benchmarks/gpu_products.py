"""What bounds a training step: the matrix products of one dense layer, on a chip as warm as in training.

    python benchmarks/gpu_products.py [--json FILE]

Times the products of a Qwen3-8B layer (16384 tokens, bf16, random data; forward, and both gradients) in the step's
order, through cuBLAS and through the tiles of quack's persistent kernels, and reads the chip's clock, power and the
reason for which it holds its clock back. Several libraries at the same rate, at the power limit, mean that no choice
of kernel makes the products faster.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from opslot.bench import environment

TOKENS, HIDDEN, INTERMEDIATE, KEY_VALUE = 16384, 4096, 12288, 1024
# Weights [out, in] of a layer, and how many of each.
WEIGHTS = {(HIDDEN, HIDDEN): 2, (KEY_VALUE, HIDDEN): 2, (INTERMEDIATE, HIDDEN): 2, (HIDDEN, INTERMEDIATE): 1}
# quack's (tile_m, tile_n, cluster_m, cluster_n, pingpong) that came out best of a dozen.
TILES = [(128, 256, 2, 1, False), (128, 192, 2, 1, True), (256, 128, 1, 2, False)]
Product = Callable[[Tensor, Tensor], Tensor]


def operands() -> Iterator[tuple[int, Tensor, Tensor]]:
    """(how often a layer has it, a, b) of every product a @ b."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    inputs, gradients = ({n: randn(TOKENS, n) for n in {n for pair in WEIGHTS for n in pair}} for _ in range(2))
    for (out, width), count in WEIGHTS.items():
        weight = randn(out, width)
        yield count, inputs[width], weight.T
        yield count, gradients[out], weight
        yield count, gradients[out].T, inputs[width]


def libraries() -> dict[str, Product]:
    found: dict[str, Product] = {"cuBLAS": torch.matmul}
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


def chip() -> dict[str, str]:
    """Clock, power and throttle reasons while the queue is full."""
    fields = "clocks.sm,power.draw,power.limit,temperature.gpu,clocks_event_reasons.sw_power_cap"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    values = subprocess.run(command, capture_output=True, text=True).stdout.strip().split(", ")
    return dict(zip(fields.split(","), values, strict=False))


def measure(product: Product, layer: list[tuple[int, Tensor, Tensor]], repeat: int) -> dict[str, object]:
    def run() -> None:
        for count, a, b in layer:
            for _ in range(count):
                product(a, b)

    run()
    heat(1.0)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeat):
        run()
    stop.record()
    state = chip()
    torch.cuda.synchronize()
    ms = start.elapsed_time(stop) / repeat
    flops = sum(2 * count * a.shape[0] * a.shape[1] * b.shape[1] for count, a, b in layer)
    return {"ms_a_layer": round(ms, 2), "tflops": round(flops / ms / 1e9), **state}


def wrong(product: Product) -> float:
    """Relative error against fp64 on random data."""
    a, b = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    truth = a.double() @ b.double()
    return ((product(a, b).double() - truth).norm() / truth.norm()).item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--repeat", type=int, default=40)
    options = parser.parse_args()
    torch.manual_seed(0)
    layer = list(operands())
    rows = []
    for _ in range(2):
        for name, product in libraries().items():
            error = wrong(product)
            if error > 4e-3:
                print(f"{name}: WRONG, relative error {error:.1e}")
                return 1
            rows.append({"library": name, "error": error, **measure(product, layer, options.repeat)})
            print(rows[-1], flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"environment": environment("cuda"), "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
