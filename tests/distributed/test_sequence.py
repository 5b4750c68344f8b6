"""Batches sharded into local sequences for two sequence-parallel ranks."""

import pytest
import torch

from opslot._base.errors import ConfigError
from opslot.distributed import ParallelState, shard_sequence


class _Ranked(ParallelState):
    """A state with a given sequence-parallel rank, without processes."""

    sp_rank = 0


def parts(batch):
    states = []
    for rank in range(2):
        state = type("State", (_Ranked,), {"sp_rank": rank})(sp=2)
        states.append(shard_sequence(batch, state))
    return states


def joined(found, name):
    return torch.cat([part[name] for part in found], 1).tolist()


def test_labels_are_shifted_over_the_global_sequence():
    found = parts({"input_ids": torch.tensor([[1, 2, 3, 4]]), "labels": torch.tensor([[-100, 2, 3, 4]])})
    assert joined(found, "input_ids") == [[1, 2, 3, 4]]
    assert joined(found, "position_ids") == [[0, 1, 2, 3]]
    assert joined(found, "shift_labels") == joined(found, "labels") == [[2, 3, 4, -100]]
    assert not {"cu_seq_lens_q", "attention_mask"} & set(found[0])


def test_shift_labels_are_not_shifted_again():
    found = parts({"input_ids": torch.tensor([[1, 2, 3]]), "shift_labels": torch.tensor([[2, 3, -100]])})
    assert joined(found, "shift_labels") == joined(found, "labels") == [[2, 3, -100, -100]]


def test_sequences_are_padded():
    found = parts({"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "labels": torch.tensor([[1, 2, 3], [4, 5, 6]])})
    assert joined(found, "input_ids") == [[1, 2, 3, 0], [4, 5, 6, 0]]
    assert joined(found, "shift_labels") == [[2, 3, -100, -100], [5, 6, -100, -100]]
    assert joined(found, "attention_mask") == [[1, 1, 1, 0], [1, 1, 1, 0]]
    assert found[0]["input_ids"].is_contiguous()


@pytest.mark.parametrize(
    "extra",
    [
        {"position_ids": torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]])},
        {"cu_seq_lens_q": torch.tensor([0, 2, 5, 10], dtype=torch.int32)},
        {"cu_seq_lens_q": torch.tensor([0, 2, 2, 5, 10, 10], dtype=torch.int32)},
        {"attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])},
    ],
)
def test_cu_seqlens_are_those_of_the_global_sequence(extra):
    found = parts({"input_ids": torch.ones(2, 5, dtype=torch.long), **extra})
    for part in found:
        assert part["cu_seq_lens_q"].tolist() == part["cu_seq_lens_k"].tolist() == [0, 2, 6, 12]
        assert part["cu_seq_lens_q"].dtype == torch.int32
        assert part["max_length_q"] == part["max_length_k"] == 6
    mask = extra.get("attention_mask", torch.ones(2, 5, dtype=torch.long))
    assert joined(found, "attention_mask") == torch.nn.functional.pad(mask, (0, 1)).tolist()


def test_positions_that_skip_numbers_are_one_document():
    positions = torch.tensor([[0, 1, 30, 31], [5, 6, 7, 80]])
    found = parts({"input_ids": torch.ones(2, 4, dtype=torch.long), "position_ids": positions})
    assert joined(found, "position_ids") == positions.tolist()
    assert not any("cu_seq_lens_q" in part for part in found)


def test_other_inputs_are_passed_on():
    found = parts({"input_ids": torch.ones(1, 2, dtype=torch.long), "use_cache": False})
    assert all(part["use_cache"] is False for part in found)


def test_without_sequence_parallelism_the_batch_is_returned():
    batch = {"input_ids": torch.ones(1, 3)}
    assert shard_sequence(batch, ParallelState()) is batch


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"attention_mask": torch.ones(1, 1, 2, 2)},
            r"attention_mask of shape \(1, 1, 2, 2\) for .* \(1, 2\)\n  hint",
        ),
        (
            {"attention_mask": {"full_attention": torch.ones(1, 2)}},
            r"attention_mask of shape dict for .*\n  hint: give",
        ),
        ({"input_ids": None, "inputs_embeds": torch.ones(1, 2, 3)}, r"has inputs_embeds\n  hint: let the model embed"),
        ({"input_ids": torch.ones(2, dtype=torch.long)}, r"input_ids of shape \(2,\)\n  hint: give \[B, S\]"),
        ({"labels": torch.ones(1, 1)}, r"labels of shape \(1, 1\) for input_ids of shape \(1, 2\)"),
        ({"shift_labels": torch.ones(2, 2)}, r"shift_labels of shape \(2, 2\) for input_ids of shape \(1, 2\)"),
        ({"position_ids": torch.ones(3, 1, 3)}, r"position_ids of shape \(3, 1, 3\) for"),
        ({"cu_seq_lens_q": torch.tensor([0, 1])}, r"rise from 0 to the 2 tokens.*\n  found: \[0, 1\]\n  hint: give"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 1, 2])}, r"rise from 0 to the 2 tokens"),
        ({"cu_seq_lens_q": torch.tensor([1, 2])}, r"rise from 0 to the 2 tokens"),
    ],
)
def test_invalid_batches_raise(changes, message):
    batch = {"input_ids": torch.ones(1, 2, dtype=torch.long), **changes}
    with pytest.raises(ConfigError, match=message):
        parts({name: value for name, value in batch.items() if value is not None})


def test_batch_with_images_keeps_its_sequences():
    ids = torch.arange(5)[None]
    positions = torch.arange(5).expand(4, 1, 5)
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions, "mm_token_type_ids": torch.ones_like(ids)}
    batch["pixel_values"] = torch.zeros(2, 3)
    first, second = parts(batch)
    for own in (first, second):
        assert own["input_ids"].shape == own["mm_token_type_ids"].shape == own["attention_mask"].shape == (1, 6)
        assert own["position_ids"].shape == (4, 1, 6)
    assert torch.cat([first["labels"], second["labels"]], 1).tolist() == [[1, 2, 3, 4, -100, -100]]


def test_positions_of_several_axes():
    ids = torch.arange(4)[None]
    text = torch.tensor([[0, 1, 0, 1]])
    batch = {"input_ids": ids, "position_ids": torch.stack([text, text + 5, text + 6, text + 7])}
    first, second = parts(batch)
    assert torch.equal(torch.cat([first["position_ids"], second["position_ids"]], -1), batch["position_ids"])
    assert first["cu_seq_lens_q"].tolist() == [0, 2, 4]
