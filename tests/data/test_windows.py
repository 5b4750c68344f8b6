"""Rows of a corpus in many blocks: the same stream however it is cut, and no block before it is needed."""

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
from opslot.data import PackedRows, RowLoader, TokenLoader, split_documents


class Block:
    def __init__(self, number, lengths):
        self.number = number
        self.lengths = np.array(lengths, dtype=np.int64)

    def tokens(self, document, start=0, stop=None):
        first = 100_000 * self.number + 1000 * document
        return np.arange(first, first + self.lengths[document], dtype=np.uint32)[start:stop]


class Corpus:
    """Blocks in memory: token t of document d of block b is the number 100,000 b + 1,000 d + t."""

    fingerprint = "in memory"

    def __init__(self, blocks):
        self.blocks = [Block(number, lengths) for number, lengths in enumerate(blocks)]
        self.sizes = np.array([max(1, sum(lengths)) for lengths in blocks])
        self.asked_for = set()

    def prepare(self, numbers):
        self.asked_for |= {int(number) for number in numbers}

    def block(self, number):
        self.prepare([number])
        return self.blocks[number]

    def every_token(self):
        return sorted(int(t) for b in self.blocks for d in range(len(b.lengths)) for t in b.tokens(d))


def epoch_of(rows, number=0):
    first = number * rows.rows_per_epoch
    return [rows[first + i] for i in range(rows.rows_per_epoch)]


def tokens_of(rows, number=0):
    return [int(t) for row in epoch_of(rows, number) for t in row["input_ids"][: rows.max_seq_len - row["padding"]]]


blocks = st.lists(st.lists(st.integers(1, 30), max_size=6), min_size=1, max_size=9).filter(any)


@settings(deadline=None)
@given(blocks=blocks, size=st.integers(2, 40), shuffle=st.booleans(), number=st.integers(0, 2))
def test_a_packed_epoch_holds_each_token_once_but_for_the_last_partial_row(blocks, size, shuffle, number):
    corpus = Corpus(blocks)
    rows = PackedRows(corpus, size, shuffle=shuffle, pad_token_id=-1)
    got, every = tokens_of(rows, number), corpus.every_token()
    assert len(got) == max(len(every) // size * size, min(len(every), size))
    assert len(set(got)) == len(got)
    assert set(got) <= set(every)
    if not shuffle:
        assert got == every[: len(got)]


@settings(deadline=None)
@given(blocks=blocks, size=st.integers(2, 40), number=st.integers(0, 2))
def test_rows_are_made_of_runs_of_single_documents_across_windows_too(blocks, size, number):
    rows = PackedRows(Corpus(blocks), size, pad_token_id=-1)
    for row in epoch_of(rows, number):
        assert sum(row["lengths"]) == size
        for piece in row["input_ids"].split(row["lengths"]):
            assert (piece == -1).all() or (piece.diff() == 1).all()


@settings(deadline=None)
@given(blocks=blocks, size=st.integers(2, 40), number=st.integers(0, 2))
def test_without_packing_every_token_comes_once(blocks, size, number):
    corpus = Corpus(blocks)
    rows = PackedRows(corpus, size, packing=False)
    assert sorted(tokens_of(rows, number)) == corpus.every_token()
    counts = rows.token_counts(number * rows.rows_per_epoch, (number + 1) * rows.rows_per_epoch)
    assert counts.tolist() == [size - row["padding"] for row in epoch_of(rows, number)]


@settings(deadline=None)
@given(blocks=blocks, size=st.integers(2, 40), place=st.integers(0, 200), packing=st.booleans())
def test_a_row_does_not_depend_on_what_was_asked_for_before(blocks, size, place, packing):
    walked, jumped = (PackedRows(Corpus(blocks), size, packing=packing, seed=2) for _ in range(2))
    for number in range(place):
        walked[number]
    assert torch.equal(walked[place]["input_ids"], jumped[place]["input_ids"])


@settings(deadline=None)
@given(blocks=blocks, size=st.integers(2, 40), packing=st.booleans())
def test_the_share_of_the_text_grows_and_is_whole_at_the_end_of_each_epoch(blocks, size, packing):
    rows = PackedRows(Corpus(blocks), size, packing=packing)
    shares = [rows.epochs(number) for number in range(2 * rows.rows_per_epoch + 1)]
    assert all(a < b for a, b in itertools.pairwise(shares))
    assert next(number for number, share in enumerate(shares) if share >= 1) == rows.rows_per_epoch
    assert shares[rows.rows_per_epoch] == 1.0
    assert shares[-1] == 2.0
    # Known before the number of rows is.
    fresh = PackedRows(Corpus(blocks), size, packing=packing)
    assert [fresh.epochs(number) for number in range(rows.rows_per_epoch + 1)] == shares[: rows.rows_per_epoch + 1]


@pytest.mark.parametrize("packing", [True, False])
def test_a_row_asks_for_the_blocks_up_to_its_window_alone(packing):
    corpus = Corpus([[40] * 10] * 300)
    rows = PackedRows(corpus, 40, packing=packing)
    order = rows.blocks_in_order().tolist()
    assert corpus.asked_for == set()
    wanted = []
    for row in range(3000):
        rows.tokens(row)
        rows.epochs(row)
        wanted.append(len(corpus.asked_for))
        assert corpus.asked_for == set(order[: wanted[-1]])
    # Ten rows a block; windows of 1, 2, 4, ... 64, 64, 64 and what is left.
    ends = np.array([1, 3, 7, 15, 31, 63, 127, 191, 255, 300])
    assert wanted == [int(ends[np.searchsorted(ends * 10, row, side="right")]) for row in range(3000)]
    assert sorted(order) == list(range(300))


def test_neighbours_in_the_text_do_not_stay_neighbours():
    rows = PackedRows(Corpus([[10] * 50] * 40), 10)
    first = [int(row["input_ids"][0]) // 1000 for row in epoch_of(rows)]
    second = [int(row["input_ids"][0]) // 1000 for row in epoch_of(rows, 1)]
    assert sorted(first) == sorted(second)
    assert first != second
    # Of n blocks in a window, one in n neighbours is of the same block.
    expected = sum(n - 1 for n in (1, 2, 4, 8, 16, 9)) / 40
    assert np.mean([a // 100 != b // 100 for a, b in itertools.pairwise(first)]) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 2)])
def test_any_number_of_ranks_goes_on_in_a_later_window_and_epoch(by_tokens, before, after):
    rng = np.random.default_rng(0)
    blocks = [rng.integers(1, 30, size=rng.integers(0, 9)).tolist() for _ in range(12)]

    def loaders(world):
        for rank in range(world):
            rows = PackedRows(Corpus(blocks), 32, packing=not by_tokens, seed=1)
            if by_tokens:
                yield TokenLoader(rows, 128, 32, rank=rank, world_size=world)
            else:
                yield RowLoader(rows, 4 // world, rank=rank, world_size=world)

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
    assert end["consumed"] > PackedRows(Corpus(blocks), 32, packing=not by_tokens).rows_per_epoch
    for stop in (1, 7, 25):
        head, state = take(before, stop)
        tail, last = take(after, steps - stop, state)
        assert head + tail == straight
        assert last == end


def test_workers_give_what_is_given_without_them():
    corpus = Corpus([[13] * 5] * 20)

    def take(workers):
        iterator = iter(RowLoader(PackedRows(corpus, 8, seed=5), 2, num_workers=workers))
        return torch.stack([next(iterator)["input_ids"] for _ in range(120)])

    assert torch.equal(take(2), take(0))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_outlive_the_signals_that_stop_a_run(number):
    before = set(multiprocessing.active_children())
    iterator = iter(RowLoader(PackedRows(Corpus([[13] * 50]), 8), 2, num_workers=2))
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


def test_held_out_documents_of_many_blocks():
    corpus = Corpus([[5] * 40] * 100)
    train, held_out = split_documents(corpus, 0.05, seed=3)
    assert corpus.asked_for == set()
    assert len(held_out.blocks) == 64
    rows = [PackedRows(corpus, 5, packing=False, documents=part) for part in (train, held_out)]
    first = PackedRows(corpus, 5, documents=train)
    first.prepare(0)
    # The block of the first row, and the one that gives a held-out document at least.
    assert len(corpus.asked_for) <= 2
    trained, evaluated = ({int(row["input_ids"][0]) for row in epoch_of(part)} for part in rows)
    assert not trained & evaluated
    assert len(trained | evaluated) == 4000
    assert 90 <= len(evaluated) <= 166  # 64 blocks of 40 * 0.05 = 2 each; the rounding of each is drawn
    assert {token // 100_000 for token in evaluated} <= set(held_out.blocks.tolist())
    again = split_documents(corpus, 0.05, seed=4)[1]
    assert set(again.blocks.tolist()) != set(held_out.blocks.tolist())


def test_one_document_is_held_out_where_the_share_is_none():
    for seed in range(20):
        corpus = Corpus([[], [3], [3], [], [3, 3]])
        parts = [PackedRows(corpus, 3, documents=part) for part in split_documents(corpus, 0.0, seed)]
        assert [part.rows_per_epoch for part in parts] == [3, 1]


def test_other_shares_held_out_are_other_data():
    corpus = Corpus([[5] * 40])
    states = [
        RowLoader(PackedRows(corpus, 5, documents=split_documents(corpus, f, 0)[0]), 1).state_dict() for f in (0.1, 0.2)
    ]
    loader = RowLoader(PackedRows(corpus, 5, documents=split_documents(corpus, 0.1, 0)[0]), 1)
    loader.load_state_dict(states[0])
    with pytest.raises(DataError, match=r"data\.eval_fraction: 0\.2 then, 0\.1 now"):
        loader.load_state_dict(states[1])


def test_blocks_without_any_document():
    with pytest.raises(DataError, match="there is no document to train on"):
        PackedRows(Corpus([[], []]), 8).tokens(0)
