"""Batches by tokens: no padding, no lost document, balanced ranks, and a state for any number of ranks."""

import itertools

import numpy as np
import pytest
import torch

from opslot._base.errors import DataError
from opslot.data.balance import balance_micro_batches
from opslot.data.collation import count_targets
from opslot.data.loader import SampleLoader, TokenLoader
from opslot.data.packing import PackedDataset
from tests.data.in_memory import Corpus

LENGTHS = [3, 30, 1, 7, 12, 5, 64, 2, 9, 9, 17, 4, 33, 6, 1, 8, 21, 3, 10, 40]


def loader(rank=0, world_size=1, lengths=LENGTHS, size=32, **options):
    dataset = PackedDataset(Corpus(lengths), size, packing=False, seed=3)
    settings = {"step_tokens": 96, "max_tokens": 32, "attention_cost": 0.01} | options
    return TokenLoader(dataset, rank=rank, world_size=world_size, **settings)


def documents(micro_batches):
    """(tokens, number) of each document of a step, sorted."""
    found = []
    for batch in micro_batches:
        if batch["input_ids"].numel() == 8 and not count_targets(batch["labels"]):
            # A rank without documents.
            continue
        offsets = batch["cu_seq_lens_q"].tolist()
        ids = batch["input_ids"].flatten()
        found += [(stop - start, int(ids[start])) for start, stop in itertools.pairwise(offsets)]
    return sorted(found)


def take(loaders, steps):
    """The documents of each step, over all ranks."""
    iterators = [iter(each) for each in loaders]
    taken = []
    for _ in range(steps):
        of_ranks = [next(iterator) for iterator in iterators]
        assert len({len(micro_batches) for micro_batches in of_ranks}) == 1
        taken.append(sorted(document for micro_batches in of_ranks for document in documents(micro_batches)))
    return taken


def test_every_token_once_per_epoch_in_steps_below_the_limit():
    one = loader()
    steps = one.steps(1)
    taken = take([one], steps)
    assert one.consumed >= one.dataset.samples_per_epoch
    assert all(sum(length for length, _ in step) <= 96 for step in taken)
    flat = [document for step in taken for document in step]
    parts = sorted((min(32, length - start), n) for n, length in enumerate(LENGTHS) for start in range(0, length, 32))
    assert len(parts) == one.dataset.samples_per_epoch
    first_epoch = []
    for step in taken:
        first_epoch += step
    # The last step may begin the next epoch.
    assert sorted(first_epoch)[: len(flat)] == sorted(flat)
    missing = parts.copy()
    for document in flat:
        if document in missing:
            missing.remove(document)
    assert missing == []


def test_micro_batches_are_packed_without_padding():
    for batch in next(iter(loader())):
        tokens = batch["input_ids"].numel()
        assert tokens <= 32
        assert batch["cu_seq_lens_q"][-1] == tokens
        starts = batch["cu_seq_lens_q"][:-1].long()
        assert (batch["labels"].flatten()[starts] == -100).all()
        assert (batch["position_ids"].flatten()[starts] == 0).all()
        assert count_targets(batch["labels"]) == tokens - len(starts)
        assert batch["max_length_q"] == batch["cu_seq_lens_q"].diff().max()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_step_is_independent_of_the_number_of_ranks(world):
    assert take([loader(rank, world, max_tokens=64) for rank in range(world)], 6) == take([loader()], 6)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_resume_on_another_number_of_ranks(before, after):
    straight = take([loader()], 7)
    first = [loader(rank, before) for rank in range(before)]
    assert take(first, 3) == straight[:3]
    states = [each.state_dict() for each in first]
    assert all(state == states[0] for state in states)
    second = [loader(rank, after) for rank in range(after)]
    for each in second:
        each.load_state_dict(states[0])
    assert take(second, 4) == straight[3:]


@pytest.mark.parametrize("changed", [{}, {"max_tokens": 64}, {"step_tokens": 64}], ids=str)
def test_resume_within_a_window_takes_each_document_once(changed):
    """Steps that are planned together are resumed from any of them, also with steps of another size afterwards."""
    lengths = list(range(1, 33)) * 8
    for done in (1, 2, 4, 6, 11):
        one = loader(lengths=lengths)
        taken = take([one], done)
        state = one.state_dict()
        other = loader(lengths=lengths, **changed)
        other.load_state_dict(state)
        iterator = iter(other)
        while other.consumed < len(lengths):
            taken.append(documents(next(iterator)))
        in_epoch = sorted(document for step in taken[:-1] for document in step)
        every = sorted((length, number) for number, length in enumerate(lengths))
        # The last step may begin the next epoch.
        assert set(in_epoch) <= set(every)
        assert len(set(in_epoch)) == len(in_epoch)
        assert set(in_epoch) | set(taken[-1]) == set(every)
        if not changed:
            assert taken == take([loader(lengths=lengths)], len(taken))


def test_state_without_a_window_continues_after_the_consumed_documents():
    one = loader(lengths=list(range(1, 33)) * 8)
    take([one], 1)
    state = one.state_dict()
    del state["window"]
    other = loader(lengths=list(range(1, 33)) * 8)
    other.load_state_dict(state)
    rest = take([other], 2)
    in_order = one.dataset.token_counts(state["consumed"], state["consumed"] + 40).tolist()
    # A window of one step and one of two: documents are taken from the next three steps' tokens.
    assert all(length in in_order for step in rest for length, _ in step)


@pytest.mark.parametrize("window", [{}, {"first": 0}, [1, 2], {"steps": "x"}], ids=str)
def test_damaged_window_raises(window):
    one = loader()
    take([one], 1)
    state = {**one.state_dict(), "window": window}
    with pytest.raises(DataError, match="no valid window"):
        loader().load_state_dict(state)


def test_resume_with_other_costs_keeps_the_steps_that_were_planned():
    straight = take([loader(lengths=list(range(1, 33)) * 8)], 12)
    one = loader(lengths=list(range(1, 33)) * 8)
    assert take([one], 4) == straight[:4]
    other = loader(lengths=list(range(1, 33)) * 8, attention_cost=1.0)
    other.load_state_dict(one.state_dict())
    assert take([other], 3) == straight[4:7]


def test_documents_wait_for_at_most_the_steps_that_are_planned_together():
    lengths = np.random.default_rng(0).integers(1, 33, 4000).tolist()
    one = loader(lengths=lengths)
    consumed = 0
    for number, step in zip(range(200), one.step_documents(), strict=False):
        before, consumed = consumed, consumed + len(step.numbers)
        assert step.window.first <= step.numbers.min()
        # Eight steps of 96 tokens, of which a document has 16.5 in the mean.
        assert step.numbers.min() > before - 8 * 12
        assert step.numbers.max() < consumed + 8 * 12, number


def test_order_without_shuffling_is_that_of_the_documents():
    dataset = PackedDataset(Corpus(LENGTHS), 32, packing=False, shuffle=False)
    steps = TokenLoader(dataset, 96, 32).step_documents()
    numbers = [sorted(step.numbers.tolist()) for _, step in zip(range(6), steps, strict=False)]
    assert [number for step in numbers for number in step] == list(range(sum(map(len, numbers))))


@pytest.mark.parametrize(
    ("mix", "ranks", "micro_batches", "most"),
    [("media", 2, 1, 0.012), ("media", 8, 1, 0.02), ("media", 8, 4, 0.008), ("video", 8, 1, 0.015)],
)
def test_ranks_wait_little_when_steps_are_planned_together(mix, ranks, micro_batches, most):
    """`most`: mean time of a step relative to an even distribution, less one. benchmarks/results/balance_epyc.json has
    the figures of more ranks, and of steps by themselves."""
    from benchmarks.balance import DECODERS, corpus, measure

    documents = corpus(mix, DECODERS["2B"], 40 * ranks * micro_batches * 8, seed=1)
    planned = measure(documents, DECODERS["2B"][1], ranks, micro_batches, lookahead=True)
    assert planned["wait"] < most
    assert planned["extra"] == 0


def test_prefetched_samples_are_not_consumed():
    here, beside = loader(), loader(num_workers=2)
    steps = iter(beside)
    for _ in range(3):
        next(steps)
    assert take([here], 3)
    assert beside.state_dict() == here.state_dict()


def test_resume_from_the_other_loader_raises():
    dataset = SampleLoader(PackedDataset(Corpus(LENGTHS), 32, packing=False, seed=3), 1)
    with pytest.raises(DataError, match=r"data\.max_tokens_per_batch: none -> set"):
        loader().load_state_dict(dataset.state_dict())
    with pytest.raises(DataError, match=r"data\.max_tokens_per_batch: set -> none"):
        dataset.load_state_dict(loader().state_dict())


def test_rank_without_documents_gets_a_batch_without_targets():
    loaders = [loader(rank, 4, lengths=[32, 32], size=32, step_tokens=64) for rank in range(4)]
    of_ranks = [next(iter(each)) for each in loaders]
    targets = [sum(count_targets(batch["labels"]) for batch in batches) for batches in of_ranks]
    assert sorted(targets) == [0, 0, 31, 31]
    idle = of_ranks[targets.index(0)][0]
    assert idle["input_ids"].shape == (1, 8)
    assert (idle["labels"] == -100).all()


def imbalance(assigned, lengths, attention_cost):
    """Imbalance of tokens and of cost: the rank with most load relative to the mean. Imbalance of time: each round
    takes as long as its longest micro batch, relative to an even distribution.
    """
    cost = lengths + attention_cost * lengths**2
    costs = np.array([[cost[indices].sum() for indices in own] for own in assigned])
    tokens = np.array([sum(lengths[indices].sum() for indices in own) for own in assigned])
    return (
        tokens.max() / tokens.mean(),
        costs.sum(1).max() / costs.sum(1).mean(),
        costs.max(0).sum() / (costs.sum() / len(assigned)),
    )


def in_order(lengths, ranks, max_tokens):
    """Micro batches without balancing: filled in order and assigned round-robin."""
    batches, room = [[]], max_tokens
    for index, length in enumerate(lengths):
        if length > room:
            batches.append([])
            room = max_tokens
        batches[-1].append(index)
        room -= length
    while len(batches) % ranks:
        batches.append([])
    return [batches[rank::ranks] for rank in range(ranks)]


def test_ranks_are_balanced_on_skewed_lengths():
    """8 ranks, two micro batches of 16k tokens each, hidden size 1024; lengths are log-normal, median 600, a fifteenth
    above 4,000, at most 8,192."""
    attention_cost, before, after = 1 / (12 * 1024), [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(6.4, 1.2, size=4000), 8, 8192).astype(np.int64)
        lengths = lengths[: np.searchsorted(lengths.cumsum(), 8 * 2 * 15500)]
        assigned = balance_micro_batches(lengths, lengths + attention_cost * lengths**2, 8, 16384)
        assert sorted(index for one in assigned for indices in one for index in indices) == list(range(len(lengths)))
        assert max(lengths[indices].sum() for one in assigned for indices in one) <= 16384
        assert {len(one) for one in assigned} == {2}
        before.append(imbalance(in_order(lengths, 8, 16384), lengths, attention_cost))
        after.append(imbalance(assigned, lengths, attention_cost))
    print("\nmean and worst of (tokens, cost, time):", np.mean(before, 0), np.max(before, 0), "as they come")
    print(np.mean(after, 0), np.max(after, 0), "balanced")
    assert np.mean(before, 0)[0] > 1.05
    assert np.mean(before, 0)[2] > 1.3
    # Tokens differ a little so that cost does not.
    assert np.max(after, 0)[0] < 1.1
    assert np.max(after, 0)[1] < 1.01
    assert np.max(after, 0)[2] < 1.015


def test_balancing_adds_micro_batches_if_documents_do_not_fit():
    def balanced(*lengths):
        sizes = np.array(lengths, dtype=np.int64)
        return balance_micro_batches(sizes, sizes.astype(float), 2, 8)

    # 24 tokens would fill three batches of 8, but two ranks need an even number; documents of 5 fill none.
    assert [len(one) for one in balanced(6, 6, 6, 2, 2, 2)] == [2, 2]
    assert [len(one) for one in balanced(5, 5, 5, 5, 5)] == [3, 3]
    assert balanced() == [[[]], [[]]]


def test_long_documents_are_split_into_samples():
    dataset = PackedDataset(Corpus([70, 5]), 32, packing=False, shuffle=False)
    assert dataset.token_counts(0, 4).tolist() == [32, 32, 6, 5]
    assert dataset.token_counts(2, 7).tolist() == [6, 5, 32, 32, 6]
    assert [len(dataset.tokens(i)[0]) for i in range(4)] == [32, 32, 6, 5]
    assert torch.equal(dataset[3]["input_ids"][:5], torch.ones(5, dtype=torch.int64))


@pytest.mark.parametrize(("batches", "most"), [(1, 1.14), (2, 1.05)])
def test_ranks_have_equal_costs_with_long_videos_images_and_text(batches, most):
    """`most`: of the most expensive rank, relative to the other. With one micro batch of few documents, the best
    partition of the worst of these steps has 1.13."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths, encoders = [], []
        while sum(lengths) < batches * 2 * 16384 - 8000:
            kind = rng.choice(3, p=[0.5, 0.4, 0.1])
            images, frames = int(rng.integers(1, 5)), int(rng.integers(8, 32))
            lengths.append(int(rng.integers(50, 800)) + [0, 1024 * images, 144 * frames][kind])
            # Of an encoder as wide as the decoder.
            encoders.append([0.0, 4096.0 * images, 576.0 * frames][kind])
        sizes = np.array(lengths)
        costs = sizes + sizes**2 / 24576 + np.array(encoders)
        by_rank = balance_micro_batches(sizes, costs, 2, 16384)
        of_ranks = [sum(costs[members].sum() for members in batches) for batches in by_rank]
        assert max(of_ranks) < most * min(of_ranks)
