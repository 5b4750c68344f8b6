"""Which of the next documents are in which optimizer step, so that ranks can share each step evenly."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from opslot.data.balance import fill

# Steps that are planned at once, and the most bins (of `max_seq_len` tokens) in them: larger steps can be shared evenly
# by themselves.
_LOOKAHEAD_STEPS, _LOOKAHEAD_BINS = 8, 512
# Documents that do not fit into the bins of a window fit when there are fewer, of so many of its tokens.
_FILLS = (1.0, 0.98, 0.95, 0.9)
# Last element of the seed, see `packing.py`.
_STEP_ORDER = 7


class StepWindow(NamedTuple):
    """Consecutive documents that are planned together, part of the dataloader state.

    Attributes:
        first: number of the first document.
        steps: number of optimizer steps.
        lookahead: number of steps where enough documents are left in the epoch.
        step_tokens: maximum tokens in a step.
        attention_cost, encoder_cost: see `TokenLoader`.
    """

    first: int
    steps: int
    lookahead: int
    step_tokens: int
    attention_cost: float
    encoder_cost: float


def longest_lookahead(step_tokens: int, bin_tokens: int) -> int:
    """Steps to plan at once."""
    return max(1, min(_LOOKAHEAD_STEPS, _LOOKAHEAD_BINS // _bins(step_tokens, bin_tokens)))


def plan_steps(
    lengths: np.ndarray, costs: np.ndarray, window: StepWindow, bin_tokens: int, seed: int
) -> list[list[list[int]]]:
    """Assign the documents of a window to steps; independent of the number of ranks and the size of micro batches.

    Documents are packed into bins of equal cost, as far as they can be. Bins of similar cost are in the same step, and
    the steps are in random order.

    Args:
        lengths: tokens of each document, at most `bin_tokens`. The last ones may be left for the next window.
        costs: estimated FLOPs of each.

    Returns:
        [step][bin] -> indices into `lengths`.
    """
    count = window.steps * _bins(window.step_tokens, bin_tokens)
    ends, tokens = lengths.cumsum(), window.steps * window.step_tokens
    for share in _FILLS:
        taken = max(1, int(np.searchsorted(ends, share * tokens, side="right")))
        bins = _pack(lengths[:taken], costs[:taken], count, bin_tokens)
        if bins is not None:
            break
    while bins is None:
        count += max(1, count // 32)
        bins = _pack(lengths[:taken], costs[:taken], count, bin_tokens)
    bins.sort(key=lambda members: (float(costs[members].sum()), members))
    numbers = np.array_split(np.arange(len(bins)), window.steps)
    steps = [[sorted(bins[number]) for number in group if bins[number]] for group in numbers]
    steps = [step for step in steps if step]
    order = np.random.default_rng([seed, window.first, 0, _STEP_ORDER]).permutation(len(steps))
    return [steps[number] for number in order]


def _pack(lengths: np.ndarray, costs: np.ndarray, count: int, bin_tokens: int) -> list[list[int]] | None:
    single = [[index] for index in range(len(lengths))]
    bins = fill(single, lengths, costs, count, bin_tokens)
    return bins or fill(single, lengths, costs, count, bin_tokens, longest_first=True)


def _bins(step_tokens: int, bin_tokens: int) -> int:
    return max(1, -(-step_tokens // bin_tokens))
