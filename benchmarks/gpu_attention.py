"""Attention on a GPU: proof in bf16, then forward plus backward in bf16 on the op's bench cases.

    python benchmarks/gpu_attention.py [--output FILE] [--commit ID] [--kernel NAME ...]

Every implementation that this machine can run: torch's flash (`sdpa`), cuDNN, FlashAttention, FlexAttention (its block
mask made outside the timed region, as Transformers makes it once for all layers). "ms" is the device's time, "alone"
the same with the host's part. Beside each number stands the verdict of the check cases and of the timed input, where
one group of heads is compared with eager code in fp32: the scores of all do not fit into the memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from opslot import KERNEL_REGISTRY
from opslot._base.device import facts_of
from opslot.bench import environment, measure_ceilings, time_both_ways
from opslot.slots import InputCase, KernelRequest, OpVariant, format_table
from opslot.verify import check_kernel

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16


def usable() -> dict[str, Callable[..., Any]]:
    request = KernelRequest("attention", "causal", facts_of(DEVICE), DTYPE)
    specs = KERNEL_REGISTRY.specs("attention", "causal")
    return {s.name: KERNEL_REGISTRY.load(*s.key) for s in specs if s.unsupported(request) is None}


def proof(name: str, kernel: Callable[..., Any], variant: OpVariant) -> str:
    for case in variant.cases:
        if case.role == "check":
            result = check_kernel(kernel, "attention", variant, case, DTYPE, DEVICE, name=name)
            if not result.ok or result.unsupported:
                return f"WRONG {result}"
    return "ok"


def made(case: InputCase, name: str) -> dict[str, Any]:
    arguments = case.make(DTYPE, DEVICE, torch.Generator(DEVICE).manual_seed(0))
    if name == "flex_attention":
        from opslot.ops.attention.flex import _block_mask

        arguments["attention_mask"] = _block_mask(arguments["query"], arguments["key"], True, arguments)
    return arguments


def agreement(kernel: Callable[..., Any], reference: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """Whether the first row's last group of heads is within 1 % of fp32, by norm: output and gradients."""
    names = ("query", "key", "value")
    leaves = [arguments[n].detach().requires_grad_() for n in names]
    out, _ = kernel(**arguments | dict(zip(names, leaves, strict=True)))
    dout = torch.randn(out.shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)).to(out)
    grads = torch.autograd.grad(out, leaves, dout)
    groups = leaves[0].shape[1] // leaves[1].shape[1]
    part = [x[:1, -n:].detach().float().requires_grad_() for x, n in zip(leaves, (groups, 1, 1), strict=True)]
    wanted, _ = reference(**arguments | dict(zip(names, part, strict=True)) | {"attention_mask": None})
    expected = [wanted, *torch.autograd.grad(wanted, part, dout[:1, :, -groups:].float())]
    found = [out[:1, :, -groups:], *(g[:1, -n:] for g, n in zip(grads, (groups, 1, 1), strict=True))]
    for what, got, want in zip(("out", *names), found, expected, strict=True):
        error = ((got.float() - want).norm() / want.norm()).item()
        if not error <= 1e-2:
            return f"WRONG {what} {error:.1e} from fp32"
    return "ok"


def rows(variant: OpVariant, names: list[str] | None) -> Iterator[dict[str, Any]]:
    ceilings = measure_ceilings(DEVICE, DTYPE)
    kernels = {name: kernel for name, kernel in usable().items() if names is None or name in names}
    proofs = {name: proof(name, kernel, variant) for name, kernel in kernels.items()}
    for case in variant.cases:
        if case.role != "bench":
            continue
        for name, kernel in kernels.items():
            row: dict[str, Any] = {"case": case.name, "kernel": name, "verdict": proofs[name], "ms": None}
            try:
                arguments = made(case, name)
                assert variant.cost is not None
                cost = variant.cost(arguments)
                row["floor_ms"] = 1e3 * max(cost.bytes / ceilings.bytes_per_s, cost.flops / ceilings.flops_per_s)
                if proofs[name] == "ok":
                    row["verdict"] = agreement(kernel, variant.reference, arguments)
                time, peak = time_both_ways(kernel, variant, arguments, DEVICE)
                row |= {"ms": time.ms, "alone_ms": time.alone_ms, "peak_mib": peak}
            except Exception as error:
                row["verdict"] = f"{type(error).__name__}: {str(error)[:160]}"
            torch.cuda.empty_cache()
            yield row


def table(found: list[dict[str, Any]]) -> str:
    def cell(x: float | None, form: str) -> str:
        return "-" if x is None else format(x, form)

    body = [
        (
            r["case"],
            r["kernel"],
            cell(r["ms"], ".3f"),
            cell(r.get("alone_ms"), ".3f"),
            cell(r["floor_ms"] / r["ms"] if r["ms"] else None, ".0%"),
            cell(r.get("peak_mib"), ".0f"),
            r["verdict"],
        )
        for r in found
    ]
    return "\n".join(format_table(("case", "kernel", "ms", "alone", "of floor", "peak MiB", "check"), body))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="of the code that runs, where there is no git")
    parser.add_argument("--kernel", nargs="+", help="only these")
    options = parser.parse_args()
    variant = KERNEL_REGISTRY.op("attention").variant("causal")
    found = list(rows(variant, options.kernel))
    print(table(found))
    if options.output:
        here = environment(DEVICE) | ({"commit": options.commit} if options.commit else {})
        options.output.write_text(json.dumps({"environment": here, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
