"""opslot's overheads on a CPU: importing it, reading a slot, generating and importing a patched module.

    python benchmarks/cpu.py [--output FILE]

Each import is timed in a process of its own, after the packages it depends on; medians of several.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import timeit

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
    from opslot.bench.files import OutputFiles
    from opslot.bench.result import Environment, Result, Run, Value

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="write the result as JSON")
    files = OutputFiles(parser.parse_args().output)
    upstream = "import torch, transformers.models.qwen3_moe.modeling_qwen3_moe"
    importing = "import opslot.generated.qwen3_moe"
    with tempfile.TemporaryDirectory() as folder:
        fresh = iter(range(1000))
        cold = median(upstream, importing, lambda: {"OPSLOT_CACHE": f"{folder}/{next(fresh)}"})
        warm = median(upstream, importing, lambda: {"OPSLOT_CACHE": f"{folder}/0"})
    slots = slot_nanoseconds()
    registry = "import opslot; opslot.KERNEL_REGISTRY.ops"
    values = [
        Value("import opslot, beyond torch", 1e3 * median("import torch", "import opslot"), "ms", "<= 150"),
        Value("import opslot and its registry, beyond torch", 1e3 * median("import torch", registry), "ms"),
        Value("generate and import qwen3_moe, cold", 1e3 * cold, "ms", "<= 1500"),
        Value("import qwen3_moe, warm", 1e3 * warm, "ms", "<= 100"),
        Value("read a bound slot", slots["bound"], "ns", "<= 150"),
        Value("read an eager slot", slots["eager"], "ns", "<= 150"),
    ]
    for v in values:
        print(f"{v.name:46} {v.value:10.3f} {v.unit:2} {v.goal:>10}")
    run = Run("python benchmarks/cpu.py", Environment.current("cpu"), values=values)
    files.write(Result("benchmarks/cpu.py", [run]))


if __name__ == "__main__":
    main()
