"""Load balancing across ranks: the documents of an optimizer step, packed into micro batches of equal cost."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import product

import numpy as np

# At most as many documents are exchanged in a step, each with one of so many micro batches.
_EXCHANGES, _CHEAPEST = 64, 2


def balance_micro_batches(
    lengths: Sequence[int] | np.ndarray,
    ranks: int,
    max_tokens: int,
    attention_cost: float = 0.0,
    other_costs: Sequence[float] | np.ndarray | None = None,
) -> list[list[list[int]]]:
    """Assign documents to ranks and micro batches; a function of the arguments alone.

    Bin packing, most expensive first (or longest first, where that is more even): each document goes to the cheapest
    micro batch with room for it. Then the most expensive micro batch exchanges documents with the cheapest ones, as
    long as that lowers its cost. Micro batches of similar cost run at the same time on all ranks, which wait for each
    other. There are as few micro batches as possible; some are empty if there are fewer documents.

    Args:
        lengths: tokens of each document, none above `max_tokens`.
        ranks: number of ranks.
        max_tokens: maximum tokens in a micro batch.
        attention_cost: a document of n tokens costs n + attention_cost * n**2.
        other_costs: added to the cost of each document, in tokens.

    Returns:
        [rank][micro batch] -> indices into `lengths`, ascending; the same number of micro batches for each rank.
    """
    sizes = [int(length) for length in lengths]
    assert max(sizes, default=0) <= max_tokens, f"a document of {max(sizes)} tokens, micro batches of {max_tokens}"
    others = [0.0] * len(sizes) if other_costs is None else [float(cost) for cost in other_costs]
    costs = [size + attention_cost * size**2 + other for size, other in zip(sizes, others, strict=True)]
    rounds = max(1, -(-sum(sizes) // (ranks * max_tokens)))
    orders = [
        sorted(range(len(sizes)), key=lambda i: (-costs[i], -sizes[i], i)),
        # Long documents of low cost may need to be first to fit.
        sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)),
    ]
    while True:
        found = [_fill(order, sizes, costs, ranks * rounds, max_tokens) for order in orders]
        fitting = [_exchange(bins, sizes, costs, max_tokens) for bins in found if bins is not None]
        if fitting:
            bins = min(fitting, key=lambda bins: max(sum(costs[i] for i in members) for members in bins))
            break
        rounds += 1
    bins.sort(key=lambda members: (-sum(costs[i] for i in members), members))
    by_rank: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for number in range(rounds):
        concurrent = bins[number * ranks : (number + 1) * ranks]
        for rank, members in zip(sorted(range(ranks), key=load.__getitem__), concurrent, strict=True):
            by_rank[rank].append(sorted(members))
            load[rank] += sum(costs[i] for i in members)
    return by_rank


def _fill(
    order: list[int], sizes: list[int], costs: list[float], count: int, max_tokens: int
) -> list[list[int]] | None:
    """`count` bins of indices; None if a document does not fit in this order."""
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    cheapest = [(0.0, number) for number in range(count)]
    for index in order:
        full = []
        while cheapest and tokens[cheapest[0][1]] + sizes[index] > max_tokens:
            full.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        cost, number = heapq.heappop(cheapest)
        bins[number].append(index)
        tokens[number] += sizes[index]
        for entry in (*full, (cost + costs[index], number)):
            heapq.heappush(cheapest, entry)
    return bins


def _exchange(bins: list[list[int]], sizes: list[int], costs: list[float], max_tokens: int) -> list[list[int]]:
    """`bins`, after documents of the most expensive one were moved to cheap ones, or exchanged for theirs."""
    tokens = [sum(sizes[i] for i in members) for members in bins]
    loads = [sum(costs[i] for i in members) for members in bins]
    for _ in range(_EXCHANGES):
        order = sorted(range(len(bins)), key=lambda number: (loads[number], number))
        most = order[-1]
        found: tuple[float, int, int, int | None] | None = None
        for cheap in order[:_CHEAPEST]:
            for given, taken in product(bins[most], (None, *bins[cheap])) if cheap != most else ():
                cost = costs[given] - (costs[taken] if taken is not None else 0.0)
                size = sizes[given] - (sizes[taken] if taken is not None else 0)
                fits = tokens[cheap] + size <= max_tokens and tokens[most] - size <= max_tokens
                higher = max(loads[most] - cost, loads[cheap] + cost)
                if fits and higher < (found[0] if found is not None else loads[most]):
                    found = higher, cheap, given, taken
        if found is None:
            break
        _, cheap, given, taken = found
        for source, target, index in ((most, cheap, given), (cheap, most, taken)):
            if index is not None:
                bins[source].remove(index)
                bins[target].append(index)
                tokens[source] -= sizes[index]
                tokens[target] += sizes[index]
                loads[source] -= costs[index]
                loads[target] += costs[index]
    return bins
