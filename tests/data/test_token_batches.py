"""Batches by tokens: nothing padded, nothing lost, ranks equally busy, a place that any number of ranks can take."""

import itertools

import numpy as np
import pytest
import torch

from opslot._base.errors import DataError
from opslot.data import PackedRows, RowLoader, TokenLoader, count_targets, share_out


class Corpus:
    """Documents of given lengths; each token is the number of its document."""

    fingerprint = "corpus"
    sizes = np.array([1])

    def __init__(self, lengths):
        self.lengths = np.array(lengths, dtype=np.int64)

    def prepare(self, numbers):
        pass

    def block(self, number):
        return self

    def tokens(self, document, start=0, stop=None):
        return np.full(int(self.lengths[document]), document, dtype=np.int32)[start:stop]


LENGTHS = [3, 30, 1, 7, 12, 5, 64, 2, 9, 9, 17, 4, 33, 6, 1, 8, 21, 3, 10, 40]


def loader(rank=0, world_size=1, lengths=LENGTHS, size=32, **options):
    rows = PackedRows(Corpus(lengths), size, packing=False, seed=3)
    settings = {"step_tokens": 96, "max_tokens": 32, "attention_share": 0.01} | options
    return TokenLoader(rows, rank=rank, world_size=world_size, **settings)


def documents(micro_batches):
    """(tokens, number) of each document of a step, sorted."""
    found = []
    for batch in micro_batches:
        borders = batch["cu_seq_lens_q"].tolist()
        ids = batch["input_ids"].flatten()
        found += [(stop - start, int(ids[start])) for start, stop in itertools.pairwise(borders)]
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


def test_an_epoch_holds_every_token_once_in_steps_of_at_most_so_many():
    one = loader()
    steps = one.steps(1)
    taken = take([one], steps)
    assert one.consumed >= one.rows.rows_per_epoch
    assert all(sum(length for length, _ in step) <= 96 for step in taken)
    flat = [document for step in taken for document in step]
    pieces = sorted((min(32, length - start), n) for n, length in enumerate(LENGTHS) for start in range(0, length, 32))
    assert len(pieces) == one.rows.rows_per_epoch
    first_epoch = []
    for step in taken:
        first_epoch += step
    # The last step may begin the next epoch.
    assert sorted(first_epoch)[: len(flat)] == sorted(flat)
    missing = pieces.copy()
    for document in flat:
        if document in missing:
            missing.remove(document)
    assert missing == []


def test_micro_batches_are_rows_without_padding_whose_documents_do_not_see_each_other():
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
def test_a_step_holds_the_same_documents_on_any_number_of_ranks(world):
    assert take([loader(rank, world, max_tokens=64) for rank in range(world)], 6) == take([loader()], 6)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_another_number_of_ranks_goes_on_where_the_first_stopped(before, after):
    straight = take([loader()], 7)
    first = [loader(rank, before) for rank in range(before)]
    assert take(first, 3) == straight[:3]
    states = [each.state_dict() for each in first]
    assert all(state == states[0] for state in states)
    second = [loader(rank, after) for rank in range(after)]
    for each in second:
        each.load_state_dict(states[0])
    assert take(second, 4) == straight[3:]


def test_what_workers_prefetched_is_not_consumed():
    here, beside = loader(), loader(num_workers=2)
    steps = iter(beside)
    for _ in range(3):
        next(steps)
    assert take([here], 3)
    assert beside.state_dict() == here.state_dict()


def test_a_run_by_rows_does_not_go_on_by_tokens():
    rows = RowLoader(PackedRows(Corpus(LENGTHS), 32, packing=False, seed=3), 1)
    with pytest.raises(DataError, match="batches: none then, whole documents, by tokens"):
        loader().load_state_dict(rows.state_dict())
    with pytest.raises(DataError, match=r"batches: whole documents, by tokens .* then, none now"):
        rows.load_state_dict(loader().state_dict())


def test_a_rank_without_a_document_runs_a_batch_that_predicts_nothing():
    loaders = [loader(rank, 4, lengths=[32, 32], size=32, step_tokens=64) for rank in range(4)]
    of_ranks = [next(iter(each)) for each in loaders]
    targets = [sum(count_targets(batch["labels"]) for batch in batches) for batches in of_ranks]
    assert sorted(targets) == [0, 0, 31, 31]
    idle = of_ranks[targets.index(0)][0]
    assert idle["input_ids"].shape == (1, 8)
    assert (idle["labels"] == -100).all()


def imbalance(shares, lengths, attention_share):
    """Tokens and cost of the busiest rank over the mean; and the time of all rounds, each as long as its longest micro
    batch, over what an even division would take."""
    cost = lengths + attention_share * lengths**2
    by_rank = np.array([[cost[places].sum() for places in share] for share in shares])
    tokens = np.array([sum(lengths[places].sum() for places in share) for share in shares])
    return (
        tokens.max() / tokens.mean(),
        by_rank.sum(1).max() / by_rank.sum(1).mean(),
        by_rank.max(0).sum() / (by_rank.sum() / len(shares)),
    )


def in_order(lengths, ranks, max_tokens):
    """What a loader does that packs documents as they come: micro batches filled one after the other, dealt in turn."""
    batches, room = [[]], max_tokens
    for place, length in enumerate(lengths):
        if length > room:
            batches.append([])
            room = max_tokens
        batches[-1].append(place)
        room -= length
    while len(batches) % ranks:
        batches.append([])
    return [batches[rank::ranks] for rank in range(ranks)]


def test_ranks_are_equally_busy_on_skewed_lengths():
    """8 ranks, two micro batches of 16k tokens each, hidden size 1024; lengths are log-normal, median 600, a fifteenth
    above 4,000, at most 8,192."""
    share, before, after = 1 / (12 * 1024), [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(6.4, 1.2, size=4000), 8, 8192).astype(np.int64)
        lengths = lengths[: np.searchsorted(lengths.cumsum(), 8 * 2 * 15500)]
        shares = share_out(lengths, 8, 16384, share)
        assert sorted(place for one in shares for places in one for place in places) == list(range(len(lengths)))
        assert max(lengths[places].sum() for one in shares for places in one) <= 16384
        assert {len(one) for one in shares} == {2}
        before.append(imbalance(in_order(lengths, 8, 16384), lengths, share))
        after.append(imbalance(shares, lengths, share))
    print("\nmean and worst of (tokens, cost, time):", np.mean(before, 0), np.max(before, 0), "as they come")
    print(np.mean(after, 0), np.max(after, 0), "shared out")
    assert np.mean(before, 0)[0] > 1.05
    assert np.mean(before, 0)[2] > 1.3
    # Tokens differ a little so that cost does not.
    assert np.max(after, 0)[0] < 1.1
    assert np.max(after, 0)[1] < 1.01
    assert np.max(after, 0)[2] < 1.015


def test_sharing_out_is_deterministic_and_takes_more_micro_batches_where_documents_do_not_fit():
    lengths = [6, 6, 6, 2, 2, 2]
    assert share_out(lengths, 2, 8) == share_out(np.array(lengths), 2, 8)
    # 24 tokens would fill three batches of 8, which two ranks cannot have; 5s fill none.
    assert [len(one) for one in share_out(lengths, 2, 8)] == [2, 2]
    assert [len(one) for one in share_out([5, 5, 5, 5, 5], 2, 8)] == [3, 3]
    assert share_out([], 2, 8) == [[[]], [[]]]


def test_documents_without_end_are_cut_to_the_longest_row():
    rows = PackedRows(Corpus([70, 5]), 32, packing=False, shuffle=False)
    assert rows.token_counts(0, 4).tolist() == [32, 32, 6, 5]
    assert rows.token_counts(2, 7).tolist() == [6, 5, 32, 32, 6]
    assert [len(rows.tokens(i)[0]) for i in range(4)] == [32, 32, 6, 5]
    assert torch.equal(rows[3]["input_ids"][:5], torch.ones(5, dtype=torch.int64))
