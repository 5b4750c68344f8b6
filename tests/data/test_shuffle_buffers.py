"""Samples of a corpus of many shards: independent of the access order; shards are loaded when needed."""

import itertools
import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opslot._base.errors import DataError
from opslot.data.loader import SampleLoader, TokenLoader
from opslot.data.packing import PackedDataset
from opslot.data.split import split_documents


class Shard:
    def __init__(self, number, lengths):
        self.number = number
        self.lengths = np.array(lengths, dtype=np.int64)

    def tokens(self, document, start=0, stop=None):
        first = 100_000 * self.number + 1000 * document
        return np.arange(first, first + self.lengths[document], dtype=np.uint32)[start:stop]

    def extra(self, document):
        return None

    def cost(self, document):
        return 0.0


class Corpus:
    """Shards in memory: token t of document d of shard b is the number 100,000 b + 1,000 d + t."""

    def __init__(self, shards):
        self.identity = {"data.train_path": "in memory"}
        self.shards = [Shard(number, lengths) for number, lengths in enumerate(shards)]
        self.sizes = np.array([max(1, sum(lengths)) for lengths in shards])
        self.requested = set()

    def sample_counts(self):
        return {}

    def prepare(self, numbers):
        self.requested |= {int(number) for number in numbers}

    def shard(self, number):
        self.prepare([number])
        return self.shards[number]

    def every_token(self):
        return sorted(int(t) for b in self.shards for d in range(len(b.lengths)) for t in b.tokens(d))


def epoch_of(dataset, number=0):
    first = number * dataset.samples_per_epoch
    return [dataset[first + i] for i in range(dataset.samples_per_epoch)]


def tokens_of(dataset, number=0):
    return [
        int(t)
        for sample in epoch_of(dataset, number)
        for t in sample["input_ids"][: dataset.max_seq_len - sample["padding"]]
    ]


shards = st.lists(st.lists(st.integers(1, 30), max_size=6), min_size=1, max_size=9).filter(any)


@settings(deadline=None)
@given(shards=shards, size=st.integers(2, 40), shuffle=st.booleans(), number=st.integers(0, 2))
def test_packed_epoch_has_each_token_once(shards, size, shuffle, number):
    corpus = Corpus(shards)
    dataset = PackedDataset(corpus, size, shuffle=shuffle, pad_token_id=-1)
    got, every = tokens_of(dataset, number), corpus.every_token()
    assert len(got) == max(len(every) // size * size, min(len(every), size))
    assert len(set(got)) == len(got)
    assert set(got) <= set(every)
    if not shuffle:
        assert got == every[: len(got)]


@settings(deadline=None)
@given(shards=shards, size=st.integers(2, 40), number=st.integers(0, 2))
def test_documents_are_contiguous_across_buffers(shards, size, number):
    dataset = PackedDataset(Corpus(shards), size, pad_token_id=-1)
    for sample in epoch_of(dataset, number):
        assert sum(sample["lengths"]) == size
        for part in sample["input_ids"].split(sample["lengths"]):
            assert (part == -1).all() or (part.diff() == 1).all()


@settings(deadline=None)
@given(shards=shards, size=st.integers(2, 40), number=st.integers(0, 2))
def test_every_token_once_without_packing(shards, size, number):
    corpus = Corpus(shards)
    dataset = PackedDataset(corpus, size, packing=False)
    assert sorted(tokens_of(dataset, number)) == corpus.every_token()
    counts = dataset.token_counts(number * dataset.samples_per_epoch, (number + 1) * dataset.samples_per_epoch)
    assert counts.tolist() == [size - sample["padding"] for sample in epoch_of(dataset, number)]


@settings(deadline=None)
@given(shards=shards, size=st.integers(2, 40), index=st.integers(0, 200), packing=st.booleans())
def test_sample_is_independent_of_access_order(shards, size, index, packing):
    walked, jumped = (PackedDataset(Corpus(shards), size, packing=packing, seed=2) for _ in range(2))
    for number in range(index):
        walked[number]
    assert torch.equal(walked[index]["input_ids"], jumped[index]["input_ids"])


@settings(deadline=None)
@given(shards=shards, size=st.integers(2, 40), packing=st.booleans())
def test_progress_increases_and_is_whole_at_each_epoch_end(shards, size, packing):
    dataset = PackedDataset(Corpus(shards), size, packing=packing)
    shares = [dataset.epochs(number) for number in range(2 * dataset.samples_per_epoch + 1)]
    assert all(a < b for a, b in itertools.pairwise(shares))
    assert next(number for number, share in enumerate(shares) if share >= 1) == dataset.samples_per_epoch
    assert shares[dataset.samples_per_epoch] == 1.0
    assert shares[-1] == 2.0
    # Known before the number of samples is.
    fresh = PackedDataset(Corpus(shards), size, packing=packing)
    assert [fresh.epochs(number) for number in range(dataset.samples_per_epoch + 1)] == shares[
        : dataset.samples_per_epoch + 1
    ]


@pytest.mark.parametrize("packing", [True, False])
def test_sample_needs_shards_up_to_its_buffer_only(packing):
    corpus = Corpus([[40] * 10] * 300)
    dataset = PackedDataset(corpus, 40, packing=packing)
    order = dataset.shards_in_order().tolist()
    assert corpus.requested == set()
    wanted = []
    for sample in range(3000):
        dataset.tokens(sample)
        dataset.epochs(sample)
        wanted.append(len(corpus.requested))
        assert corpus.requested == set(order[: wanted[-1]])
    # Ten samples per shard; buffers of 1, 2, 4, ... 64, 64, 64 shards and the rest.
    ends = np.array([1, 3, 7, 15, 31, 63, 127, 191, 255, 300])
    assert wanted == [int(ends[np.searchsorted(ends * 10, sample, side="right")]) for sample in range(3000)]
    assert sorted(order) == list(range(300))


def test_shuffling_separates_neighbors():
    dataset = PackedDataset(Corpus([[10] * 50] * 40), 10)
    first = [int(sample["input_ids"][0]) // 1000 for sample in epoch_of(dataset)]
    second = [int(sample["input_ids"][0]) // 1000 for sample in epoch_of(dataset, 1)]
    assert sorted(first) == sorted(second)
    assert first != second
    # In a buffer of n shards, one in n neighbors is from the same shard.
    expected = sum(n - 1 for n in (1, 2, 4, 8, 16, 9)) / 40
    assert np.mean([a // 100 != b // 100 for a, b in itertools.pairwise(first)]) == pytest.approx(expected, abs=0.02)


@pytest.mark.quick("2-4-True", "4-2-False")
@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 2)])
def test_resume_on_other_ranks_in_later_buffers_and_epochs(by_tokens, before, after):
    rng = np.random.default_rng(0)
    shards = [rng.integers(1, 30, size=rng.integers(0, 9)).tolist() for _ in range(12)]

    def loaders(world):
        for rank in range(world):
            dataset = PackedDataset(Corpus(shards), 32, packing=not by_tokens, seed=1)
            if by_tokens:
                yield TokenLoader(dataset, 128, 32, rank=rank, world_size=world)
            else:
                yield SampleLoader(dataset, 4 // world, rank=rank, world_size=world)

    def take(world, steps, state=None):
        members = list(loaders(world))
        for member in members:
            if state:
                member.load_state_dict(state)
        iterators = [iter(member) for member in members]
        taken = []
        for _ in range(steps):
            found = [next(iterator) for iterator in iterators]
            batches = [batch for own in found for batch in own] if by_tokens else found
            step = torch.cat([batch["input_ids"].flatten() for batch in batches])
            taken.append(sorted(step[step > 0].tolist()) if by_tokens else step.tolist())
        assert len({member.epoch for member in members}) == 1
        return taken, members[0].state_dict()

    steps = 40
    straight, end = take(1, steps)
    assert end["consumed"] > PackedDataset(Corpus(shards), 32, packing=not by_tokens).samples_per_epoch
    for stop in (1, 7, 25):
        head, state = take(before, stop)
        tail, last = take(after, steps - stop, state)
        assert head + tail == straight
        assert last == end


def test_batches_are_equal_with_and_without_workers():
    corpus = Corpus([[13] * 5] * 20)

    def take(workers):
        iterator = iter(SampleLoader(PackedDataset(corpus, 8, seed=5), 2, num_workers=workers))
        return torch.stack([next(iterator)["input_ids"] for _ in range(120)])

    assert torch.equal(take(2), take(0))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_survive_stop_signals(number):
    before = set(multiprocessing.active_children())
    iterator = iter(SampleLoader(PackedDataset(Corpus([[13] * 50]), 8), 2, num_workers=2))
    for _ in range(4):
        next(iterator)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker.pid, number)
    for _ in range(100):
        next(iterator)
    del iterator
    for worker in workers:
        worker.join(10)
        assert worker.exitcode == 0


def test_held_out_documents_of_many_shards():
    corpus = Corpus([[5] * 40] * 100)
    train, held_out = split_documents(corpus, 0.05, seed=3)
    assert corpus.requested == set()
    assert len(held_out.shards) == 64
    dataset = [PackedDataset(corpus, 5, packing=False, documents=part) for part in (train, held_out)]
    first = PackedDataset(corpus, 5, documents=train)
    first.prepare(0)
    # The shard of the first sample, and the one with at least one held-out document.
    assert len(corpus.requested) <= 2
    trained, evaluated = ({int(sample["input_ids"][0]) for sample in epoch_of(part)} for part in dataset)
    assert not trained & evaluated
    assert len(trained | evaluated) == 4000
    assert 90 <= len(evaluated) <= 166  # 64 shards of 40 * 0.05 = 2 each, rounded randomly
    assert {token // 100_000 for token in evaluated} <= set(held_out.shards.tolist())
    again = split_documents(corpus, 0.05, seed=4)[1]
    assert set(again.shards.tolist()) != set(held_out.shards.tolist())


def test_at_least_one_document_is_held_out():
    for seed in range(20):
        corpus = Corpus([[], [3], [3], [], [3, 3]])
        parts = [PackedDataset(corpus, 3, documents=part) for part in split_documents(corpus, 0.0, seed)]
        assert [part.samples_per_epoch for part in parts] == [3, 1]


def test_changed_eval_fraction_raises_on_resume():
    corpus = Corpus([[5] * 40])
    states = [
        SampleLoader(PackedDataset(corpus, 5, documents=split_documents(corpus, f, 0)[0]), 1).state_dict()
        for f in (0.1, 0.2)
    ]
    loader = SampleLoader(PackedDataset(corpus, 5, documents=split_documents(corpus, 0.1, 0)[0]), 1)
    loader.load_state_dict(states[0])
    with pytest.raises(DataError, match=r"data\.eval_fraction: 0\.2 -> 0\.1"):
        loader.load_state_dict(states[1])


def test_shards_without_documents_raise():
    with pytest.raises(DataError, match="no documents to train on"):
        PackedDataset(Corpus([[], []]), 8).tokens(0)
