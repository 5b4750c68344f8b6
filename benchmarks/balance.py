"""How evenly optimizer steps are shared between ranks: estimated FLOPs on generated mixes of text, images and videos.

    python benchmarks/balance.py [--output FILE]

Texts have 50 to 4,000 tokens, images 256 to 2,048 pixels a side, videos 8 to 128 frames of 448 x 448, all log-uniform;
of the documents with media half have an image and a tenth a video. Sizes are those of Qwen3-VL-2B and -8B: 16 x 16
patches, 4 of them a token, an encoder of 27 layers of width 1152. A micro batch has at most 16,384 tokens, as has a
document.

`wait` is the time of a step relative to an even distribution, less one: the sum of the most expensive micro batch of
each round of micro batches, over the mean cost of a rank. `extra` is the number of micro batches beyond those that the
tokens fill. Both are given for steps planned together, and for each step by itself as its documents come.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from typing import Any

import numpy as np

MAX_TOKENS = 16384
PATCH, MERGED = 16, 4
ENCODER_LAYERS, ENCODER_WIDTH = 27, 1152
DECODERS = {"2B": (28, 2048), "8B": (36, 4096)}
MIXES = {"text": (1.0, 0.0, 0.0), "media": (0.4, 0.5, 0.1), "video": (0.3, 0.0, 0.7)}
STEPS = 24


class Corpus:
    """Documents of given lengths and costs of their encoders."""

    sizes = np.array([1])

    def __init__(self, lengths: np.ndarray, costs: np.ndarray) -> None:
        self.lengths, self.costs = lengths, costs
        self.identity: dict[str, Any] = {}

    def prepare(self, numbers: Any) -> None:
        pass

    def shard(self, number: int) -> Corpus:
        return self

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        return np.zeros(int(self.lengths[document]), np.int32)[start:stop]

    def extra(self, document: int) -> None:
        return None

    def cost(self, document: int) -> float:
        return float(self.costs[document])


def corpus(mix: str, decoder: tuple[int, int], documents: int, seed: int = 0) -> Corpus:
    rng = np.random.default_rng(seed)

    def log_uniform(low: float, high: float) -> np.ndarray:
        return np.exp(rng.uniform(np.log(low), np.log(high), documents))

    kind = rng.choice(3, p=MIXES[mix], size=documents)
    text = log_uniform(50, 4000)
    side = PATCH * 2
    image = np.prod([np.round(log_uniform(256, 2048) / side) * side / PATCH for _ in range(2)], axis=0)
    frame = (448 / PATCH) ** 2
    pairs = np.round(log_uniform(8, 128) / 2)
    patches = np.select([kind == 1, kind == 2], [image, pairs * frame], 0.0)
    attended = np.select([kind == 1, kind == 2], [image, np.full(documents, frame)], 0.0)
    lengths = np.minimum(np.where(kind == 0, text, np.minimum(text, 500)) + patches / MERGED, MAX_TOKENS)
    layers, width = decoder
    costs = patches * ENCODER_LAYERS * ENCODER_WIDTH * (ENCODER_WIDTH + attended / 6) / (layers * width**2)
    return Corpus(lengths.astype(np.int64), costs)


def measure(documents: Corpus, width: int, ranks: int, micro_batches: int, lookahead: bool) -> dict[str, float]:
    """Mean and worst wait of a step, micro batches, and seconds to plan it."""
    from opslot.data.balance import balance_micro_batches
    from opslot.data.loader import TokenLoader
    from opslot.data.packing import PackedDataset

    dataset = PackedDataset(documents, MAX_TOKENS, packing=False, shuffle=lookahead)
    step_tokens = ranks * micro_batches * MAX_TOKENS
    loader = TokenLoader(dataset, step_tokens, MAX_TOKENS, attention_cost=1 / (12 * width), world_size=ranks)
    waits, rounds = [], []
    start = time.perf_counter()
    for _, step in zip(range(STEPS), loader.step_documents(), strict=False):
        by_rank = balance_micro_batches(step.lengths, step.costs, ranks, MAX_TOKENS, planned=step.bins)
        each = np.array([[step.costs[members].sum() for members in own] for own in by_rank])
        waits.append(each.max(0).sum() / (each.sum() / ranks) - 1)
        rounds.append(len(by_rank[0]) / -(-int(step.lengths.sum()) // (ranks * MAX_TOKENS)))
    seconds = (time.perf_counter() - start) / STEPS
    return {"wait": np.mean(waits), "worst": np.max(waits), "extra": np.mean(rounds) - 1, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="write the result as JSON")
    args = parser.parse_args()
    from opslot.bench.files import OutputFiles
    from opslot.bench.result import Environment, Result, Run, Value

    files = OutputFiles(args.output)
    values = []
    print("mix    model  ranks  micro batches | planned: wait worst extra | by itself: wait worst extra | s/step")
    for (mix, name), ranks, micro_batches in itertools.product(
        itertools.product(MIXES, DECODERS), (2, 8, 64), (1, 4, 8)
    ):
        width = DECODERS[name][1]
        documents = corpus(mix, DECODERS[name], 40 * ranks * micro_batches * 8)
        planned, alone = (measure(documents, width, ranks, micro_batches, lookahead) for lookahead in (True, False))
        both = " | ".join(f"{one['wait']:12.2%} {one['worst']:6.2%} {one['extra']:5.1%}" for one in (planned, alone))
        print(f"{mix:6} {name:5} {ranks:6} {micro_batches:14} | {both} | {planned['seconds']:.3f}", flush=True)
        case = f"{mix}, {name}, {ranks} ranks, {micro_batches} micro batches"
        values.append(Value(f"{case}: wait, steps planned together", round(float(planned["wait"]), 5), "of a step"))
        values.append(Value(f"{case}: wait, each step by itself", round(float(alone["wait"]), 5), "of a step"))
    command = "python benchmarks/balance.py"
    files.write(Result("benchmarks/balance.py", [Run(command, Environment.current("cpu"), values=values)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
