"""The small figures on CPU: importing opslot, reading a slot, generating and importing a patched module.

    python benchmarks/cpu.py            prints the table and writes benchmarks/results/cpu.json

Each import is timed in a process of its own, after the packages it builds on; medians of several.
(The demo model's step is benchmarks/cpu_demo_step.py, loading benchmarks/loading.py.)
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "cpu.json"
REPEAT = 7


def in_process(before: str, code: str, env: dict[str, str] | None = None) -> float:
    """Seconds that `code` takes in a fresh interpreter after `before`."""
    program = f"import time\n{before}\nbegin = time.perf_counter()\n{code}\nprint(time.perf_counter() - begin)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**os.environ, **(env or {})}
    )
    return float(done.stdout.split()[-1])


def median(before: str, code: str, env=dict) -> float:
    return statistics.median(in_process(before, code, env()) for _ in range(REPEAT))


def slot_nanoseconds() -> dict[str, float]:
    """Nanoseconds to read a slot of a bound and of an unbound norm of a generated model."""
    from transformers import Qwen3Config

    import opslot

    config = Qwen3Config(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16
    )
    out = {}
    for label, ops in (("bound", "auto"), ("eager", "eager")):
        module = opslot.build_foundation_model(config, ops_implementation=ops).model.norm
        number = 200_000
        best = min(timeit.repeat("module._opslot_rms_norm", globals={"module": module}, number=number, repeat=9))
        out[label] = 1e9 * best / number
    return out


def main() -> None:
    from opslot.bench import environment

    upstream = "import torch, transformers.models.qwen3_moe.modeling_qwen3_moe"
    importing = "import opslot.generated.qwen3_moe"
    with tempfile.TemporaryDirectory() as folder:
        fresh = iter(range(1000))
        cold = median(upstream, importing, lambda: {"OPSLOT_CACHE": f"{folder}/{next(fresh)}"})
        warm = median(upstream, importing, lambda: {"OPSLOT_CACHE": f"{folder}/0"})
    slots = slot_nanoseconds()
    rows = [
        ("import opslot, beyond torch", median("import torch", "import opslot"), 0.15, "s"),
        (
            "import opslot and its registry, beyond torch",
            median("import torch", "import opslot; opslot.KERNEL_REGISTRY.ops"),
            None,
            "s",
        ),
        ("generate and import qwen3_moe, cold", cold, 1.5, "s"),
        ("import qwen3_moe, warm", warm, 0.1, "s"),
        ("read a bound slot", slots["bound"], 150.0, "ns"),
        ("read an eager slot", slots["eager"], 150.0, "ns"),
    ]
    print(f"{'what':46} {'measured':>12} {'goal':>10}")
    for what, value, goal, unit in rows:
        print(f"{what:46} {value:10.3f} {unit:2} {'' if goal is None else f'<= {goal:g}':>10}")
    RESULT.write_text(
        json.dumps(
            {
                "environment": environment("cpu"),
                "rows": [{"what": w, "value": v, "goal": g, "unit": u} for w, v, g, u in rows],
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
