"""Documents of an optimizer step, shared among ranks and micro batches so that all compute equally long."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def share_out(
    lengths: Sequence[int] | np.ndarray, ranks: int, max_tokens: int, attention_share: float = 0.0
) -> list[list[list[int]]]:
    """Which documents each rank takes into each of its micro batches; a function of the arguments alone.

    Longest first, each document goes to the micro batch that costs least so far and has room, and micro batches of
    like cost run at the same time on all ranks, which wait for each other. There are as few as hold everything; where
    documents are fewer than they, some are empty.

    Args:
        lengths: tokens of each document, none above `max_tokens`.
        ranks: that share the documents.
        max_tokens: in a micro batch.
        attention_share: a document of n tokens costs n + attention_share * n**2.

    Returns:
        [rank][micro batch] -> places in `lengths`, ascending; the same number of micro batches for each rank.
    """
    sizes = [int(length) for length in lengths]
    assert max(sizes, default=0) <= max_tokens, f"a document of {max(sizes)} tokens, micro batches of {max_tokens}"
    costs = [size + attention_share * size**2 for size in sizes]
    rounds = max(1, -(-sum(sizes) // (ranks * max_tokens)))
    while (bins := _fill(sizes, costs, ranks * rounds, max_tokens)) is None:
        rounds += 1
    bins.sort(key=lambda members: (-sum(costs[i] for i in members), members))
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for number in range(rounds):
        together = bins[number * ranks : (number + 1) * ranks]
        for rank, members in zip(sorted(range(ranks), key=load.__getitem__), together, strict=True):
            shares[rank].append(sorted(members))
            load[rank] += sum(costs[i] for i in members)
    return shares


def _fill(sizes: list[int], costs: list[float], count: int, room: int) -> list[list[int]] | None:
    """`count` lists of places; None when this order leaves a document without room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    cheapest = [(0.0, number) for number in range(count)]
    for place in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        full = []
        while cheapest and tokens[cheapest[0][1]] + sizes[place] > room:
            full.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        cost, number = heapq.heappop(cheapest)
        bins[number].append(place)
        tokens[number] += sizes[place]
        for entry in (*full, (cost + costs[place], number)):
            heapq.heappush(cheapest, entry)
    return bins
