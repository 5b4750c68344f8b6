import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opslot._base.errors import DataError
from opslot.data.collation import collate, collate_padded, count_targets
from opslot.data.loader import EvaluationLoader, SampleLoader
from opslot.data.packing import PackedDataset
from opslot.data.split import split_documents
from tests.data.in_memory import Corpus


class Documents(Corpus):
    """Document i has the tokens 1000 * i, 1000 * i + 1, ..."""

    def tokens(self, document, start=0, stop=None):
        return np.arange(1000 * document, 1000 * document + self.lengths[document], dtype=np.int32)[start:stop]


def epoch_of(samples, number=0):
    first = number * samples.samples_per_epoch
    return [samples[first + i] for i in range(samples.samples_per_epoch)]


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(lengths=lengths, size=st.integers(2, 32), drop_last=st.booleans())
def test_packed_samples_concatenate_the_documents(lengths, size, drop_last):
    samples = PackedDataset(Documents(lengths), size, shuffle=False, drop_last=drop_last)
    stream = np.concatenate([np.arange(1000 * i, 1000 * i + n) for i, n in enumerate(lengths)])
    got = torch.cat([sample["input_ids"][: size - sample["padding"]] for sample in epoch_of(samples)]).numpy()
    whole = max(size * (len(stream) // size), min(len(stream), size))
    np.testing.assert_array_equal(got, stream[:whole] if drop_last else stream)


@given(lengths=lengths, size=st.integers(2, 32), seed=st.integers(0, 3), number=st.integers(0, 2))
def test_documents_in_a_sample_are_contiguous(lengths, size, seed, number):
    samples = PackedDataset(Documents(lengths), size, seed=seed, pad_token_id=-1)
    for sample in epoch_of(samples, number):
        assert sum(sample["lengths"]) == size
        for piece in sample["input_ids"].split(sample["lengths"]):
            if (piece == -1).all():
                assert len(piece) == sample["padding"]
            else:
                assert (piece.diff() == 1).all()


@given(lengths=lengths, size=st.integers(2, 32), seed=st.integers(0, 3))
def test_every_token_once_per_epoch_without_packing(lengths, size, seed):
    samples = PackedDataset(Documents(lengths), size, packing=False, seed=seed)
    assert samples.samples_per_epoch == sum(-(-n // size) for n in lengths)
    got = torch.cat([sample["input_ids"][: size - sample["padding"]] for sample in epoch_of(samples)]).sort().values
    want = torch.cat([torch.arange(1000 * i, 1000 * i + n) for i, n in enumerate(lengths)])
    assert torch.equal(got, want)
    assert all(len(sample["lengths"]) == 1 + (sample["padding"] > 0) for sample in epoch_of(samples))


def test_order_depends_on_seed_and_epoch():
    documents = Documents([7] * 20)

    def tokens(seed, number):
        return torch.cat([r["input_ids"] for r in epoch_of(PackedDataset(documents, 10, seed=seed), number)])

    assert torch.equal(tokens(0, 1), tokens(0, 1))
    assert not torch.equal(tokens(0, 0), tokens(0, 1))
    assert not torch.equal(tokens(0, 0), tokens(1, 0))


def test_collate_marks_document_boundaries():
    samples = PackedDataset(Documents([3, 4, 2, 3]), 6, shuffle=False)
    batch = collate([samples[0], samples[1]])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 1000, 1001, 1002], [1003, 2000, 2001, 3000, 3001, 3002]]
    assert batch["labels"].tolist() == [[-100, 1, 2, -100, 1001, 1002], [-100, -100, 2001, -100, 3001, 3002]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2], [0, 0, 1, 0, 1, 2]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 6, 7, 9, 12]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 3
    assert count_targets(batch["labels"]) == 7
    assert "attention_mask" not in batch


def test_padding_is_never_predicted():
    samples = PackedDataset(Documents([3]), 8, pad_token_id=9)
    batch = collate([samples[0]])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 9, 9, 9, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 1, 2, *[-100] * 5]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 8]
    assert count_targets(batch["labels"]) == 2


def test_padded_batches_have_a_mask_and_no_boundaries():
    samples = PackedDataset(Documents([3, 5]), 5, packing=False, shuffle=False, pad_token_id=9)
    batch = collate_padded([samples[0], samples[1]])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 9, 9], [1000, 1001, 1002, 1003, 1004]]
    assert batch["labels"].tolist() == [[-100, 1, 2, -100, -100], [-100, 1001, 1002, 1003, 1004]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert batch.keys() == {"input_ids", "labels", "attention_mask", "position_ids"}
    assert "attention_mask" not in collate_padded([samples[1]])
    assert count_targets(batch["labels"]) == 6
    assert (
        next(iter(SampleLoader(samples, 2))).keys()
        == next(iter(EvaluationLoader(samples, 2)))[0].keys()
        == batch.keys()
    )


def take(loader, count):
    iterator = iter(loader)
    return [next(iterator)["input_ids"] for _ in range(count)]


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_resumes_from_its_state(workers):
    samples = PackedDataset(Documents([13] * 30), 8, seed=5)
    straight = take(SampleLoader(samples, 2), 40)
    first = SampleLoader(samples, 2, num_workers=workers)
    iterator = iter(first)
    head = [next(iterator)["input_ids"] for _ in range(17)]
    state = first.state_dict()
    second = SampleLoader(samples, 2)
    second.load_state_dict(state)
    assert torch.equal(torch.stack(straight), torch.stack(head + take(second, 23)))
    assert second.epoch == pytest.approx(80 / samples.samples_per_epoch)


def test_global_batch_is_independent_of_ranks_and_micro_batch_size():
    samples = PackedDataset(Documents([13] * 30), 8)
    alone = torch.cat(take(SampleLoader(samples, 8), 5))
    ranks = [take(SampleLoader(samples, 2, rank=rank, world_size=2), 10) for rank in range(2)]
    together = torch.cat([batch for pair in zip(*ranks, strict=True) for batch in pair])
    assert torch.equal(alone, together)


def test_state_of_other_data_raises():
    state = SampleLoader(PackedDataset(Documents([9] * 4), 4), 2).state_dict()
    other = SampleLoader(PackedDataset(Documents([9] * 4), 6, seed=3), 2)
    with pytest.raises(DataError) as caught:
        other.load_state_dict(state)
    assert "data.max_seq_len: 4 -> 6" in str(caught.value)
    assert "train.seed: 0 -> 3" in str(caught.value)


@pytest.mark.parametrize(
    "state", [{}, {"_snapshot": {}}, {"consumed": "8", "dataset": {}}, {"consumed": 8, "dataset": None}]
)
def test_state_of_another_loader_raises(state):
    loader = SampleLoader(PackedDataset(Documents([9] * 4), 4), 2)
    with pytest.raises(
        DataError, match=r"not that of a SampleLoader\n  found: .*; expected: consumed, dataset\n  hint: continue"
    ):
        loader.load_state_dict(state)
    assert loader.consumed == 0


def test_evaluation_visits_every_sample_once():
    samples = PackedDataset(Documents([5] * 9), 4, shuffle=False)
    batches = [batch for batch, _ in EvaluationLoader(samples, 4)]
    assert [len(b["input_ids"]) for b in batches] == [4, 4, 3]
    assert torch.equal(
        torch.cat([b["input_ids"] for b in batches]), torch.stack([r["input_ids"] for r in epoch_of(samples)])
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("sizes", [[5] * 9, [4, 4, 5], [3], [8, 8]])
def test_evaluation_pads_the_last_partial_sample(sizes, world_size):
    samples = PackedDataset(Documents(sizes), 4, shuffle=False, drop_last=False, pad_token_id=9)
    assert samples.samples_per_epoch == -(-sum(sizes) // 4)
    batches = [
        batch
        for rank in range(world_size)
        for batch, counts in EvaluationLoader(samples, 2, rank=rank, world_size=world_size)
        if counts
    ]
    whole = PackedDataset(Documents(sizes), sum(sizes), shuffle=False)
    predicted = sorted(int(label) for batch in batches for label in batch["labels"].flatten() if label != -100)
    # A sample's first token has no label.
    starts = [int(tokens[0]) for tokens in whole[0]["input_ids"].split(4)]
    firsts = [1000 * document for document in range(len(sizes))]
    assert predicted == sorted(set(whole[0]["input_ids"].tolist()) - {*starts, *firsts})


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("max_tokens", [None, 12])
def test_evaluation_assembles_only_a_ranks_own_batches(workers, max_tokens):
    samples = PackedDataset(Documents([5, 3, 4, 7, 2, 6, 5, 8]), 8, shuffle=False, packing=False)

    def batches_of(rank, world_size):
        made = []

        def collate_once(drawn):
            made.append(len(drawn))
            return collate(drawn) if max_tokens else collate_padded(drawn)

        options = {"max_tokens": max_tokens, "collate_fn": collate_once, "rank": rank, "world_size": world_size}
        found = list(EvaluationLoader(samples, 2, num_workers=workers, **options))
        assert workers or len(made) == len(found)
        return found

    whole = [batch["input_ids"].tolist() for batch, _ in batches_of(0, 1)]
    ranks = [batches_of(rank, 3) for rank in range(3)]
    together = [batch["input_ids"].tolist() for turn in zip(*ranks, strict=True) for batch, counts in turn if counts]
    assert together == whole
    # A rank without a batch of its own runs another's.
    assert [len(rank) for rank in ranks] == [2, 2, 2]
    assert [counts for _, counts in ranks[2]] == [True, False]


def test_held_out_documents_are_not_trained_on():
    documents = Documents([5] * 50)
    train, held_out = (part.of(0, documents) for part in split_documents(documents, 0.1, seed=0))
    assert len(held_out) == 5
    assert sorted([*train, *held_out]) == list(range(50))
    samples = PackedDataset(documents, 5, documents=split_documents(documents, 0.1, seed=0)[0])
    seen = {int(t) // 1000 for sample in epoch_of(samples) for t in sample["input_ids"]}
    assert seen == set(train.tolist())
    with pytest.raises(DataError, match=r"set data\.eval_path"):
        split_documents(Documents([5]), 0.1, seed=0)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(2, 30), min_size=1, max_size=8))
def test_cached_and_in_memory_samples_are_equal(corpus_of, lengths):
    samples = PackedDataset(corpus_of(lengths), 8, shuffle=False)
    tokens = torch.cat([sample["input_ids"][: 8 - sample["padding"]] for sample in epoch_of(samples)])
    ends = np.cumsum(lengths) - 1
    assert np.flatnonzero(tokens == 0).tolist() == [e for e in ends if e < len(tokens)]


@given(lengths=lengths, size=st.integers(2, 32), seed=st.integers(0, 3), number=st.integers(0, 2))
def test_attended_pairs_are_those_of_the_documents(lengths, size, seed, number):
    samples = PackedDataset(Documents(lengths), size, seed=seed)
    for index in range(number * len(samples), (number + 1) * len(samples)):
        parts = samples.tokens(index)
        assert samples.attended_pairs(index) == sum(len(part) ** 2 for part in parts)


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_samples_of_similar_attention_run_at_the_same_time(micro_batch_size):
    """Long documents and short ones, in samples of 512 tokens; 4 ranks, steps of 32 samples."""
    lengths = [512] * 30 + [16] * 2000 + [100] * 300
    samples = PackedDataset(Documents(lengths), 512, seed=0)

    def waits(step_samples):
        loaders = [
            SampleLoader(samples, micro_batch_size, rank=rank, world_size=4, step_samples=step_samples)
            for rank in range(4)
        ]
        batches = [loader.sample_numbers() for loader in loaders]
        total, longest, seen = 0, 0, []
        for _ in range(64 // 4 // micro_batch_size):
            of_ranks = [next(batch) for batch in batches]
            seen.append(sorted(number for numbers in of_ranks for number in numbers))
            costs = [sum(samples.attended_pairs(number) for number in numbers) for numbers in of_ranks]
            total, longest = total + sum(costs) / 4, longest + max(costs)
        half = len(seen) // 2
        for first, taken in ((0, seen[:half]), (32, seen[half:])):
            assert sorted(itertools.chain.from_iterable(taken)) == list(range(first, first + 32))
        return longest / total

    assert waits(32) < 1.2 < 1.5 < waits(None)
