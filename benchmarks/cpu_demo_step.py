"""Training step of the demo's model on a CPU: opslot under auto and under eager beside Transformers' own class.

    python benchmarks/cpu_demo_step.py [--rounds 15] [--threads 2] [--output FILE]

The four models have the same weights and the same batch. Rounds are interleaved in one process, so that other load on
the machine affects all of them; a speed is the median over rounds, a ratio the median of the ratios of each round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import opslot
from opslot.bench.files import OutputFiles
from opslot.bench.result import Environment, Result, Run, Value
from opslot.data.collation import collate

sys.path.insert(0, str(Path(__file__).parents[1]))
from demos.text import MODEL

# As in configs/demo.yaml.
BATCH_SIZE, LENGTH = 4, 512
# The implementations of "transformers eager".
_PLAIN = {"preset": "eager", "attn_implementation": "eager", "moe_implementation": "eager"}


def models() -> dict[str, Any]:
    """The compared models, from the same weights."""
    config = AutoConfig.for_model(**MODEL)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config)
    plain_eager = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    plain_eager.set_experts_implementation("eager")
    built = {
        "transformers": plain,
        "opslot auto": opslot.build_foundation_model(config, ops_implementation="auto"),
        "transformers eager": plain_eager,
        "opslot eager": opslot.build_foundation_model(config, ops_implementation=_PLAIN),
    }
    for model in built.values():
        model.load_state_dict(plain.state_dict())
        model.train()
    return built


def batch(count: int) -> dict[str, Any]:
    """Packed sequences as in the demo, about three documents each."""
    generator = torch.Generator().manual_seed(0)
    lengths = [100, 250, 162]
    samples = [
        {
            "input_ids": torch.randint(1, MODEL["vocab_size"], (LENGTH,), generator=generator),
            "lengths": lengths[i % 3 :] + lengths[: i % 3],
            "padding": 0,
        }
        for i in range(count)
    ]
    return collate(samples)


def step(model: Any, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]) -> tuple[float, float]:
    """(loss, seconds) of a whole training step."""
    begun = time.perf_counter()
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item(), time.perf_counter() - begun


def measure(rounds: int, samples: int) -> list[Value]:
    """Speeds and ratios, after a check that all models compute the same losses."""
    inputs = batch(samples)
    candidates = {
        name: (model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)) for name, model in models().items()
    }
    losses: dict[str, list[float]] = {name: [] for name in candidates}
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for number in range(rounds + 2):
        # Rotate, so that no model always runs after the same other one.
        for name in names[number % 4 :] + names[: number % 4]:
            loss, spent = step(*candidates[name], inputs)
            losses[name].append(loss)
            if number >= 2:
                seconds[name].append(spent)
    reference = torch.tensor(losses["transformers"])
    for name in names:
        torch.testing.assert_close(
            torch.tensor(losses[name]), reference, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert losses["opslot eager"] == losses["transformers eager"], "eager must equal Transformers bit for bit"
    shape = f"{samples} x {LENGTH} tokens"
    speeds = {name: samples * LENGTH / statistics.median(times) for name, times in seconds.items()}
    speedup = _median_ratio(seconds["transformers"], seconds["opslot auto"])
    overhead = _median_ratio(seconds["opslot eager"], seconds["transformers eager"])
    return [
        *(Value(f"{name}, {shape}", speed, "tokens/s") for name, speed in speeds.items()),
        Value(f"speed of opslot auto / transformers, {shape}", speedup, "x", ">= 1.5"),
        Value(f"time of opslot eager / transformers eager, {shape}", overhead, "x", "<= 1.01"),
    ]


def _median_ratio(numerator: list[float], denominator: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", help="write the result as JSON")
    options = parser.parse_args()
    files = OutputFiles(options.output)
    torch.set_num_threads(options.threads)
    run = Run("python benchmarks/cpu_demo_step.py", Environment.current("cpu"))
    for samples in (BATCH_SIZE, 2 * BATCH_SIZE):
        run.values.extend(measure(options.rounds, samples))
    for v in run.values:
        print(f"{v.name:60} {v.value:10,.3f} {v.unit:8} {v.goal}")
    files.write(Result("benchmarks/cpu_demo_step.py", [run]))


if __name__ == "__main__":
    main()
