"""Training step of the demo's model on a CPU: opslot under auto and under eager beside Transformers' own class.

    python benchmarks/cpu_demo_step.py [--rounds 15] [--threads 2]

The four models have the same weights and see the same batch. Rounds are interleaved in one process, so that whatever
else the machine does falls on all of them; a speed is the median over rounds, a ratio the median of the rounds' own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import opslot
from opslot.data import collate
from opslot.trainer.demo import LENGTH, MODEL, ROWS

RESULT = Path(__file__).parent / "results" / "cpu_demo_step.json"
SHAPES = {"demo": ROWS, "wide": 2 * ROWS}


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
        "opslot eager": opslot.build_foundation_model(config, ops_implementation="eager"),
    }
    for model in built.values():
        model.load_state_dict(plain.state_dict())
        model.train()
    return built


def batch(count: int) -> dict[str, Any]:
    """Rows of packed documents, as the demo's are: about three documents a row."""
    generator = torch.Generator().manual_seed(0)
    lengths = [100, 250, 162]
    rows = [
        {
            "input_ids": torch.randint(1, MODEL["vocab_size"], (LENGTH,), generator=generator),
            "lengths": lengths[i % 3 :] + lengths[: i % 3],
            "padding": 0,
        }
        for i in range(count)
    ]
    return collate(rows)


def step(model: Any, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]) -> tuple[float, float]:
    """(loss, seconds) of a whole training step."""
    begun = time.perf_counter()
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item(), time.perf_counter() - begun


def measure(rounds: int, rows: int) -> dict[str, Any]:
    """Times of every model, after a check that all of them compute the same losses."""
    inputs = batch(rows)
    contestants = {
        name: (model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)) for name, model in models().items()
    }
    losses: dict[str, list[float]] = {name: [] for name in contestants}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds + 2):
        # Rotate, so that no model always runs after the same other one.
        for name in names[number % 4 :] + names[: number % 4]:
            loss, spent = step(*contestants[name], inputs)
            losses[name].append(loss)
            if number >= 2:
                seconds[name].append(spent)
    reference = torch.tensor(losses["transformers"])
    for name in names:
        torch.testing.assert_close(
            torch.tensor(losses[name]), reference, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert losses["opslot eager"] == losses["transformers eager"], "eager must be upstream's own code, bit for bit"
    tokens = rows * LENGTH
    return {
        "tokens_per_s": {name: round(tokens / statistics.median(times)) for name, times in seconds.items()},
        "best_tokens_per_s": {name: round(tokens / min(times)) for name, times in seconds.items()},
        "auto_speedup": round(_median_ratio(seconds["transformers"], seconds["opslot auto"]), 3),
        "eager_time_ratio": round(_median_ratio(seconds["opslot eager"], seconds["transformers eager"]), 4),
        "final_loss": {name: values[-1] for name, values in losses.items()},
        "kernels": {row.op: row.chosen for row in opslot.explain(contestants["opslot auto"][0])},
        "rounds": rounds,
        "batch": [rows, LENGTH],
    }


def _median_ratio(numerator: list[float], denominator: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def surroundings() -> dict[str, Any]:
    """Machine, versions and commit."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    model_name = next(
        (line.split(":")[1].strip() for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "machine": {"cpu": model_name, "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "load_average": os.getloadavg()[0],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "opslot": opslot.__version__,
        },
    }


def _read(path: str) -> str:
    return Path(path).read_text() if Path(path).is_file() else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    before = surroundings()
    result = {**before, "goals": {"auto_speedup": ">= 1.5", "eager_time_ratio": "<= 1.01"}}
    for shape, rows in SHAPES.items():
        found = result[shape] = measure(options.rounds, rows)
        print(f"{shape}: {rows} rows of {LENGTH} tokens")
        for name, speed in found["tokens_per_s"].items():
            print(f"  {name:20} {speed:>8,} tokens/s")
        print(f"  auto: {found['auto_speedup']}x Transformers' (goal 1.5)")
        print(f"  eager: {found['eager_time_ratio']} of the time of Transformers' eager (goal 1.01)")
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
