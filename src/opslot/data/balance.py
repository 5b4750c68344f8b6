"""Load balancing across ranks: the documents of an optimizer step, packed into micro batches of equal cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

# At most as many documents are exchanged in a step, each with one of so many micro batches.
_EXCHANGES, _CHEAPEST = 64, 2
# Micro batches with so much of the mean cost at most are even enough.
_EVEN = 1.002


def balance_micro_batches(
    lengths: np.ndarray, costs: np.ndarray, ranks: int, max_tokens: int, planned: Sequence[Sequence[int]] = ()
) -> list[list[list[int]]]:
    """Assign documents to ranks and micro batches; a function of the arguments alone.

    Bin packing, most expensive first (or longest first, or as `planned`, where that is more even): each document goes
    to the cheapest micro batch with room for it. Then the most expensive micro batch exchanges documents with the
    cheapest ones, as long as that lowers its cost. Micro batches of similar cost run at the same time on all ranks,
    which wait for each other. There are as few micro batches as possible; some are empty if there are fewer documents.

    Args:
        lengths: tokens of each document, int64, none above `max_tokens`.
        costs: estimated FLOPs of each, in tokens.
        ranks: number of ranks.
        max_tokens: maximum tokens in a micro batch.
        planned: sets of documents of similar cost, as `plan_steps` returns them.

    Returns:
        [rank][micro batch] -> indices into `lengths`, ascending; the same number of micro batches for each rank.
    """
    longest = lengths.max(initial=0)
    assert longest <= max_tokens, f"a document of {longest} tokens, micro batches of {max_tokens}"
    rounds = max(1, -(-int(lengths.sum()) // (ranks * max_tokens)))
    single = [[index] for index in range(len(lengths))]
    # Long documents of low cost may need to be first to fit.
    tries = [*([(planned, False)] if planned else []), (single, False), (single, True)]
    found: list[tuple[float, float, list[list[int]]]] = []
    while not found:
        for items, longest_first in tries:
            bins = fill(items, lengths, costs, ranks * rounds, max_tokens, longest_first)
            if bins is not None:
                bins = _exchange(bins, lengths.tolist(), costs.tolist(), max_tokens)
                loads = np.array([costs[members].sum() for members in bins])
                # Where the most expensive micro batch cannot be cheaper, the others still can be even.
                found.append((float(loads.max()), float((loads**2).sum()), bins))
                if loads.max() <= _EVEN * loads.mean():
                    break
        rounds += 1
    bins = min(found)[-1]
    rounds = len(bins) // ranks
    bins.sort(key=lambda members: (-float(costs[members].sum()), members))
    by_rank: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for number in range(rounds):
        concurrent = bins[number * ranks : (number + 1) * ranks]
        for rank, members in zip(sorted(range(ranks), key=load.__getitem__), concurrent, strict=True):
            by_rank[rank].append(sorted(members))
            load[rank] += float(costs[members].sum())
    return by_rank


def fill(
    items: Sequence[Sequence[int]],
    sizes: np.ndarray,
    costs: np.ndarray,
    count: int,
    max_tokens: int,
    longest_first: bool = False,
) -> list[list[int]] | None:
    """Sets of documents in `count` bins, most expensive first, each in the cheapest bin that has room for it.

    Returns:
        [bin] -> documents; None if one does not fit in this order.
    """
    numbers = np.repeat(np.arange(len(items)), [len(item) for item in items])
    members = np.array([index for item in items for index in item], dtype=np.int64)
    tokens, loads = (np.bincount(numbers, each[members], minlength=len(items)) for each in (sizes, costs))
    order = np.lexsort((-loads, -tokens) if longest_first else (-tokens, -loads))
    bins: list[list[int]] = [[] for _ in range(count)]
    room, load = np.full(count, float(max_tokens)), np.zeros(count)
    for index in order.tolist():
        fits = np.where(room >= tokens[index], load, np.inf)
        number = int(fits.argmin())
        if fits[number] == np.inf:
            return None
        bins[number] += items[index]
        room[number] -= tokens[index]
        load[number] += loads[index]
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
