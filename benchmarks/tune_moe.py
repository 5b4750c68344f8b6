"""Time each grouped GEMM of fused_triton or fused_quack with many tiles, to choose those that are committed.

python benchmarks/tune_moe.py KERNEL [--cases N,N] [--gemms gate_up,down,...]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

from opslot.ops.moe_experts import triton as fused
from opslot.ops.moe_experts._autograd import Experts, Wanted
from opslot.ops.moe_experts.op import OP
from opslot.ops.moe_experts.routing import route
from opslot.ops.moe_experts.tiling import Tiles, plan_for

GEMMS = ("gate_up", "down", "act_grad", "input_grad", "gate_up_grad", "down_grad")
CASES = [c for c in OP.variant("standard").cases if c.role == "bench"]


def bench(function: Callable[[], Any]) -> float:
    return triton.testing.do_bench(function, warmup=10, rep=60, return_mode="median")


def triton_tiles(gemm: str) -> Iterator[Tiles]:
    shapes = {
        "gate_up": [(128, 128, 64, 8, 3), (128, 128, 64, 8, 4)],
        "gate_up_grad": [(128, 256, 64, 8, 3), (256, 128, 64, 8, 3)],
        "down_grad": [(128, 256, 64, 8, 3), (256, 128, 64, 8, 3)],
    }.get(gemm, [(128, 256, 64, 8, 3)])
    for shape, flatten, group in itertools.product(shapes, (False, True), (4, 8, 16)):
        yield Tiles(*shape, group=group, flatten=flatten)


def tune_triton(arguments: dict[str, torch.Tensor], gemms: list[str]) -> None:
    x, gate_up, down, index, weights = arguments.values()
    count, hidden, intermediate = down.shape
    top_k = index.shape[1]
    experts = Experts(gate_up, down)
    plan = plan_for(experts)
    routing = route(index, count, plan.align)
    rows_x = fused.gather(x, top_k, routing)
    rows_grad = fused.gather(torch.randn_like(x), top_k, routing)
    projected, act = fused.gate_up(plan, x, experts, top_k, routing)
    act_grad = fused.rows_gemm(plan, plan.act_grad, rows_grad, down, intermediate, False, routing)
    projected_grad, weighted_act, _ = fused.gate_grad(plan, act_grad, projected, rows_grad, experts, weights, routing)
    outputs = fused.rows_gemm(plan, plan.down, act, down, hidden, True, routing)
    weight = gate_up.view(2 * count, intermediate, hidden)
    for name, other in {
        "route": lambda: route(index, count, plan.align),
        "gather": lambda: fused.gather(x, top_k, routing),
        "gate_grad": lambda: fused.gate_grad(plan, act_grad, projected, rows_grad, experts, weights, routing),
        "combine": lambda: fused.combine(outputs, routing.pair_to_row, weights, True),
    }.items():
        print(f"{name:13} {bench(other):7.3f} ms")

    def run(gemm: str, tiles: Tiles) -> Any:
        trial = dataclasses.replace(plan, **{gemm: tiles})
        if gemm == "gate_up":
            return fused.gate_up(trial, x, experts, top_k, routing)
        if gemm == "down":
            return fused.rows_gemm(trial, tiles, act, down, hidden, True, routing)
        if gemm == "act_grad":
            return fused.rows_gemm(trial, tiles, rows_grad, down, intermediate, False, routing)
        if gemm == "input_grad":
            return fused.rows_gemm(trial, tiles, projected_grad, weight, hidden, False, routing)
        if gemm == "gate_up_grad":
            return fused.weight_grad_gemm(trial, tiles, projected_grad, rows_x, routing)
        return fused.weight_grad_gemm(trial, tiles, rows_grad, weighted_act, routing)

    for gemm in gemms:
        results = []
        for tiles in triton_tiles(gemm):
            try:
                ms = bench(lambda p=gemm, t=tiles: run(p, t))
                results.append((ms, dataclasses.astuple(tiles)))
            except Exception as error:
                print(f"{gemm} {tiles}: {type(error).__name__} {str(error)[:80]}")
        flops = 2 * index.numel() * hidden * intermediate
        flops *= 2 if gemm in ("gate_up", "input_grad", "gate_up_grad") else 1
        for ms, tile in sorted(results)[: 10 if gemm == "gate_up" else 4]:
            print(f"{gemm:13} {ms:7.3f} ms {flops / ms / 1e9:5.0f} TFLOP/s {tile}", flush=True)


def tune_quack(arguments: dict[str, torch.Tensor], gemms: list[str]) -> None:
    """Every tile by the time of the whole forward or backward pass."""
    from opslot.ops.moe_experts import quack

    x, gate_up, down, index, weights = arguments.values()
    grad = torch.randn_like(x)
    experts = Experts(gate_up, down)
    _, *saved = quack._forward(x, experts, index, weights)
    runs = {
        True: lambda: quack._forward(x, experts, index, weights),
        False: lambda: quack._backward(grad, x, experts, weights, saved, Wanted(True, True, False)),
    }
    print(f"forward {bench(runs[True]):.3f} backward {bench(runs[False]):.3f}", flush=True)
    for gemm in gemms:
        kept = quack.CUTS[gemm]
        results = []
        for m, n, pingpong in (
            (128, 128, True),
            (128, 192, True),
            (128, 256, False),
            (256, 128, False),
            (256, 192, False),
        ):
            quack.CUTS[gemm] = quack._cut(m, n, pingpong)
            try:
                results.append((bench(runs[gemm in ("gate_up", "down")]), (m, n, pingpong)))
            except Exception as error:
                print(f"{gemm} {(m, n, pingpong)}: {type(error).__name__} {str(error)[:80]}")
        quack.CUTS[gemm] = quack._cut(*min(results)[1]) if results else kept
        print(gemm, " ".join(f"{tile}:{ms:.3f}" for ms, tile in sorted(results)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kernel", choices=("fused_triton", "fused_quack"))
    parser.add_argument("--cases", default="0")
    parser.add_argument("--gemms", default=",".join(GEMMS))
    options = parser.parse_args()
    for number in options.cases.split(","):
        case = CASES[int(number)]
        print(case.name)
        arguments = case.make(torch.bfloat16, torch.device("cuda"), torch.Generator("cuda").manual_seed(0))
        (tune_triton if options.kernel == "fused_triton" else tune_quack)(arguments, options.gemms.split(","))
        del arguments
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
