"""Time each product of fused_triton under many cuts, to choose the plans that `triton.py` commits.

python benchmarks/tune_moe.py [--case NAME] [--products gate_up,down,...]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time

import torch
import triton

from opslot.ops.moe_experts import triton as fused
from opslot.ops.moe_experts.op import OP
from opslot.ops.moe_experts.routing import route

Tiles = fused.Tiles


def cuts(product: str) -> list[Tiles]:
    base = {
        "gate_up": [(128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 64, 64, 4, 4), (128, 128, 32, 8, 5)],
        "act_grad": [(128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 64, 8, 3)],
        "down": [(128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 4, 3), (128, 128, 64, 8, 4)],
        "input_grad": [(128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 4, 3), (128, 128, 64, 8, 4)],
        "gate_up_grad": [(128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 4, 3), (128, 128, 64, 8, 4)],
        "down_grad": [(128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 4, 3), (128, 128, 64, 8, 4)],
    }[product]
    found = []
    for (bm, bn, bk, warps, stages), flatten in itertools.product(base, (False, True)):
        for per_sm in (1, 2, 10_000):
            if per_sm == 2 and warps == 8 and bn == 256:
                continue
            if per_sm == 10_000 and flatten:
                continue
            for gather in (True, False) if product not in ("down", "input_grad") else (False,):
                found.append(Tiles(bm, bn, bk, warps, stages, 8, per_sm, flatten, gather))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", default="Qwen3-30B-A3B layer, T=16384")
    parser.add_argument("--products", default="gate_up,down,act_grad,input_grad,gate_up_grad,down_grad")
    parser.add_argument("--seconds", type=float, default=400)
    options = parser.parse_args()
    deadline = time.time() + options.seconds
    case = next(c for c in OP.variant("standard").cases if c.name == options.case)
    a = case.make(torch.bfloat16, torch.device("cuda"), torch.Generator("cuda").manual_seed(0))
    x, gate_up, down, index, weights = a.values()
    experts, hidden, intermediate = down.shape
    top_k = index.shape[1]
    plan = fused.plan_for(x, down, index)
    routing = route(index, experts, plan.align)
    slots = index.numel()
    grad = torch.randn_like(x)
    unit = 2 * slots * hidden * intermediate
    rows_x = fused.gather(x, top_k, routing)
    projected, act = fused.gate_up(plan, x, gate_up, top_k, routing)
    projected_grad, weighted_act, _ = fused.act_grad(
        plan, grad if plan.act_grad.gather else fused.gather(grad, top_k, routing), down, projected, weights, routing
    )
    rows_grad = fused.gather(grad, top_k, routing)
    outputs = fused.rows_product(plan, plan.down, act, down, hidden, True, routing)

    def bench(function) -> float:
        return triton.testing.do_bench(function, warmup=10, rep=40, return_mode="median")

    print(f"route {bench(lambda: route(index, experts, plan.align)):.3f} ms")
    print(f"gather {bench(lambda: fused.gather(x, top_k, routing)):.3f} ms")
    print(f"combine {bench(lambda: fused.combine(outputs, routing.places, weights, True)):.3f} ms", flush=True)
    weight = gate_up.view(2 * experts, intermediate, hidden)
    for product in options.products.split(","):
        results = []
        for tiles in cuts(product):
            if time.time() > deadline:
                break
            trial = dataclasses.replace(plan, **{product: tiles})
            source_x, source_grad = (x, grad) if tiles.gather else (rows_x, rows_grad)
            run = {
                "gate_up": lambda: fused.gate_up(trial, x, gate_up, top_k, routing, rows_x),
                "down": lambda: fused.rows_product(trial, tiles, act, down, hidden, True, routing),
                "act_grad": lambda: fused.act_grad(trial, source_grad, down, projected, weights, routing),
                "input_grad": lambda: fused.rows_product(trial, tiles, projected_grad, weight, hidden, False, routing),
                "gate_up_grad": lambda: fused.weight_grad_product(
                    trial, tiles, projected_grad, source_x, 2, top_k, routing
                ),
                "down_grad": lambda: fused.weight_grad_product(
                    trial, tiles, source_grad, weighted_act, 1, top_k, routing
                ),
            }[product]
            try:
                results.append((bench(run), tiles))
            except Exception as error:
                print(f"{product} {tiles}: {type(error).__name__} {str(error)[:80]}")
        flops = unit * (2 if product in ("gate_up", "input_grad", "gate_up_grad") else 1)
        for ms, tiles in sorted(results, key=lambda r: r[0])[:7]:
            print(
                f"{product:13} {ms:7.3f} ms {flops / ms / 1e9:5.0f} TFLOP/s {tuple(vars(tiles).values())}", flush=True
            )


if __name__ == "__main__":
    main()
