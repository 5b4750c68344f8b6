import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opslot._base.errors import DataError
from opslot.data import PackedRows, RowLoader, collate, count_targets, evaluation_batches, split_documents


class Documents:
    """A corpus in memory: document i holds the numbers 1000 * i, 1000 * i + 1, ..."""

    fingerprint = "in memory"
    sizes = np.array([1])

    def __init__(self, lengths):
        self.lengths = np.array(lengths, dtype=np.int64)

    def prepare(self, numbers):
        pass

    def block(self, number):
        return self

    def tokens(self, document, start=0, stop=None):
        return np.arange(1000 * document, 1000 * document + self.lengths[document], dtype=np.int32)[start:stop]


def epoch_of(rows, number=0):
    first = number * rows.rows_per_epoch
    return [rows[first + i] for i in range(rows.rows_per_epoch)]


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(lengths=lengths, size=st.integers(2, 32))
def test_packed_rows_are_the_documents_end_to_end(lengths, size):
    rows = PackedRows(Documents(lengths), size, shuffle=False)
    stream = np.concatenate([np.arange(1000 * i, 1000 * i + n) for i, n in enumerate(lengths)])
    got = torch.cat([row["input_ids"][: size - row["padding"]] for row in epoch_of(rows)]).numpy()
    whole = max(size * (len(stream) // size), min(len(stream), size))
    np.testing.assert_array_equal(got, stream[:whole])


@given(lengths=lengths, size=st.integers(2, 32), seed=st.integers(0, 3), number=st.integers(0, 2))
def test_each_row_is_made_of_runs_of_single_documents(lengths, size, seed, number):
    rows = PackedRows(Documents(lengths), size, seed=seed, pad_token_id=-1)
    for row in epoch_of(rows, number):
        assert sum(row["lengths"]) == size
        for piece in row["input_ids"].split(row["lengths"]):
            if (piece == -1).all():
                assert len(piece) == row["padding"]
            else:
                assert (piece.diff() == 1).all()


@given(lengths=lengths, size=st.integers(2, 32), seed=st.integers(0, 3))
def test_without_packing_every_token_comes_once_an_epoch(lengths, size, seed):
    rows = PackedRows(Documents(lengths), size, packing=False, seed=seed)
    assert rows.rows_per_epoch == sum(-(-n // size) for n in lengths)
    got = torch.cat([row["input_ids"][: size - row["padding"]] for row in epoch_of(rows)]).sort().values
    want = torch.cat([torch.arange(1000 * i, 1000 * i + n) for i, n in enumerate(lengths)])
    assert torch.equal(got, want)
    assert all(len(row["lengths"]) == 1 + (row["padding"] > 0) for row in epoch_of(rows))


def test_epochs_differ_and_seeds_repeat():
    documents = Documents([7] * 20)

    def tokens(seed, number):
        return torch.cat([r["input_ids"] for r in epoch_of(PackedRows(documents, 10, seed=seed), number)])

    assert torch.equal(tokens(0, 1), tokens(0, 1))
    assert not torch.equal(tokens(0, 0), tokens(0, 1))
    assert not torch.equal(tokens(0, 0), tokens(1, 0))


def test_a_batch_tells_documents_apart_in_every_way_that_kernels_ask_for():
    rows = PackedRows(Documents([3, 4, 2, 3]), 6, shuffle=False)
    batch = collate([rows[0], rows[1]])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 1000, 1001, 1002], [1003, 2000, 2001, 3000, 3001, 3002]]
    assert batch["labels"].tolist() == [[-100, 1, 2, -100, 1001, 1002], [-100, -100, 2001, -100, 3001, 3002]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2], [0, 0, 1, 0, 1, 2]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 6, 7, 9, 12]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 3
    assert count_targets(batch["labels"]) == 7
    assert "attention_mask" not in batch


def test_padding_is_a_document_that_nothing_predicts():
    rows = PackedRows(Documents([3]), 8, pad_token_id=9)
    batch = collate([rows[0]])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 9, 9, 9, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 1, 2, *[-100] * 5]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 8]
    assert count_targets(batch["labels"]) == 2


def take(loader, count):
    iterator = iter(loader)
    return [next(iterator)["input_ids"] for _ in range(count)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_where_its_state_was_taken(workers):
    rows = PackedRows(Documents([13] * 30), 8, seed=5)
    straight = take(RowLoader(rows, 2), 40)
    first = RowLoader(rows, 2, num_workers=workers)
    iterator = iter(first)
    head = [next(iterator)["input_ids"] for _ in range(17)]
    state = first.state_dict()
    second = RowLoader(rows, 2)
    second.load_state_dict(state)
    assert torch.equal(torch.stack(straight), torch.stack(head + take(second, 23)))
    assert second.epoch == pytest.approx(80 / rows.rows_per_epoch)


def test_global_batches_do_not_depend_on_ranks_or_micro_batches():
    rows = PackedRows(Documents([13] * 30), 8)
    alone = torch.cat(take(RowLoader(rows, 8), 5))
    ranks = [take(RowLoader(rows, 2, rank=rank, world_size=2), 10) for rank in range(2)]
    together = torch.cat([batch for pair in zip(*ranks, strict=True) for batch in pair])
    assert torch.equal(alone, together)


def test_a_loader_refuses_a_place_in_other_data():
    state = RowLoader(PackedRows(Documents([9] * 4), 4), 2).state_dict()
    other = RowLoader(PackedRows(Documents([9] * 4), 6, seed=3), 2)
    with pytest.raises(DataError) as caught:
        other.load_state_dict(state)
    assert "data.max_seq_len: 4 then, 6 now" in str(caught.value)
    assert "train.seed: 0 then, 3 now" in str(caught.value)


@pytest.mark.parametrize("state", [{}, {"_snapshot": {}}, {"consumed": "8", "rows": {}}, {"consumed": 8, "rows": None}])
def test_a_loader_refuses_the_place_of_another_kind_of_loader(state):
    loader = RowLoader(PackedRows(Documents([9] * 4), 4), 2)
    with pytest.raises(
        DataError, match=r"not one of a RowLoader\n  found: .*; expected: consumed, rows\n  hint: go on"
    ):
        loader.load_state_dict(state)
    assert loader.consumed == 0


def test_evaluation_sees_every_row_once():
    rows = PackedRows(Documents([5] * 9), 4, shuffle=False)
    batches = list(evaluation_batches(rows, 4))
    assert [len(b["input_ids"]) for b in batches] == [4, 4, 3]
    assert torch.equal(
        torch.cat([b["input_ids"] for b in batches]), torch.stack([r["input_ids"] for r in epoch_of(rows)])
    )


def test_held_out_documents_are_not_trained_on():
    documents = Documents([5] * 50)
    train, held_out = (part.of(0, documents) for part in split_documents(documents, 0.1, seed=0))
    assert len(held_out) == 5
    assert sorted([*train, *held_out]) == list(range(50))
    rows = PackedRows(documents, 5, documents=split_documents(documents, 0.1, seed=0)[0])
    seen = {int(t) // 1000 for row in epoch_of(rows) for t in row["input_ids"]}
    assert seen == set(train.tolist())
    with pytest.raises(DataError, match=r"set data\.eval_path"):
        split_documents(Documents([5]), 0.1, seed=0)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(2, 30), min_size=1, max_size=8))
def test_rows_from_disk_equal_rows_from_memory(corpus_of, lengths):
    rows = PackedRows(corpus_of(lengths), 8, shuffle=False)
    tokens = torch.cat([row["input_ids"][: 8 - row["padding"]] for row in epoch_of(rows)])
    ends = np.cumsum(lengths) - 1
    assert np.flatnonzero(tokens == 0).tolist() == [e for e in ends if e < len(tokens)]
