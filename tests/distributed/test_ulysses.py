"""Sequence parallelism on two ranks against one process, values and gradients, in fp64."""

from functools import partial

import pytest
import torch

from opslot._base.errors import ConfigError
from opslot.distributed import init_parallel_state
from opslot.distributed.ulysses import (
    gather_heads_scatter_seq,
    gather_outputs,
    gather_seq_scatter_heads,
    kv_repeats,
    slice_input_tensor,
    sp_pad_and_slice,
    ulysses_attention,
    unpad_tensor,
)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(x, dim, rank):
    return x.chunk(2, dim)[rank]


def transposes():
    """Both directions move what they say, and their gradients move it back."""
    rank = init_parallel_state(device_type="cpu", sp=2).sp_rank
    worst = 0.0
    for shape, seq, heads in (((2, 6, 4, 3), 1, 2), ((6, 8), 0, 1), ((1, 4, 6), 1, -1), ((2, 4, 6, 3), 2, 1)):
        full, weight = random(*shape), random(*shape, seed=1)
        for move, before, after in (
            (partial(gather_seq_scatter_heads, seq_dim=seq, head_dim=heads), seq, heads),
            (partial(gather_heads_scatter_seq, seq_dim=seq, head_dim=heads), heads, seq),
        ):
            x = part(full, before, rank).clone().requires_grad_()
            out = move(x)
            assert torch.equal(out, part(full, after, rank))
            (out * part(weight, after, rank)).sum().backward()
            worst = max(worst, (x.grad - part(weight, before, rank)).abs().max().item())
    return worst


def test_sequence_and_heads_change_places_and_back(ranks):
    assert ranks.run(transposes) == [0.0, 0.0]


def gather_and_slice():
    """sum over ranks of loss_r(gather(slice(x))) has the gradient of one process that adds up those losses."""
    rank = init_parallel_state(device_type="cpu", sp=2).sp_rank
    full = random(3, 7, 2)
    weights = [random(3, 7, 2, seed=s) for s in (1, 2)]
    x = full.clone().requires_grad_()
    local = sp_pad_and_slice(x, 1, pad_value=9.0, pad_scale=2)
    assert local.shape == (3, 4, 2)
    whole = gather_outputs(local * local, 1, unpadded_size=7)
    (whole * weights[rank]).sum().backward()
    # The ranks hold copies of x, so its gradient is the sum of theirs.
    torch.distributed.all_reduce(x.grad)
    return torch.equal(whole, full * full), (x.grad - 2 * full * sum(weights)).abs().max().item()


def test_gather_and_slice_have_the_gradient_of_the_summed_loss(ranks):
    for equal, error in ranks.run(gather_and_slice):
        assert equal
        assert error < 1e-14


def test_one_process_gets_its_input_back():
    x = random(2, 5, 3)
    for same in (
        gather_seq_scatter_heads(x, 1, 2),
        gather_heads_scatter_seq(x, 2, 1),
        gather_outputs(x, 1),
        slice_input_tensor(x, 1),
        sp_pad_and_slice(x, 1),
    ):
        assert same is x
    assert torch.equal(unpad_tensor(x, 1, 4), x[:, :4])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sp", "repeats"),
    [(8, 8, 2, 1), (8, 2, 2, 1), (8, 2, 4, 2), (8, 1, 8, 8), (12, 4, 6, 3), (12, 6, 4, 2)],
)
def test_key_value_heads_are_repeated_until_they_divide(heads, kv_heads, sp, repeats):
    assert kv_repeats(heads, kv_heads, sp) == repeats


@pytest.mark.parametrize(("heads", "kv_heads", "sp"), [(6, 2, 4), (12, 4, 8)])
def test_heads_that_do_not_divide_name_sizes_that_do(heads, kv_heads, sp):
    with pytest.raises(ConfigError, match=rf"sp={sp} does not divide {heads} query heads.*would: 1, 2, 3?"):
        kv_repeats(heads, kv_heads, sp)


def plain_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * scaling
    cu_seqlens = kwargs["cu_seq_lens_q"]
    document = torch.searchsorted(cu_seqlens[1:], torch.arange(query.shape[0] * query.shape[2]), right=True)
    document = document.view(query.shape[0], 1, -1)
    allowed = (document[..., :, None] == document[..., None, :]).tril()
    return (scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ value).transpose(1, 2), None


def attention_parity(heads, kv_heads, pipeline=1):
    """Packed documents that cross the ranks' border: output and gradients against one process."""
    rank = init_parallel_state(device_type="cpu", sp=2).sp_rank
    batch, length, width = 2, 10, 4
    options = {"scaling": 0.5, "cu_seq_lens_q": torch.tensor([0, 3, 10, 17, 20])}
    full = [random(batch, n, length, width, seed=n + s) for s, n in enumerate((heads, kv_heads, kv_heads))]
    weight = random(batch, length, heads, width, seed=9)
    whole = [x.clone().requires_grad_() for x in full]
    expected, _ = plain_attention(None, *whole, None, **options)
    (expected * weight).sum().backward()
    local = [part(x, 2, rank).clone().requires_grad_() for x in full]
    found, weights = ulysses_attention(plain_attention, pipeline=pipeline)(None, *local, None, **options)
    (found * part(weight, 1, rank)).sum().backward()
    assert weights is None
    errors = [(found - part(expected, 1, rank)).abs().max()]
    errors += [(x.grad - part(y.grad, 2, rank)).abs().max() for x, y in zip(local, whole, strict=True)]
    return max(e.item() for e in errors)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 3)])
def test_attention_over_the_whole_sequence(ranks, heads, kv_heads):
    assert max(ranks.run(attention_parity, heads, kv_heads)) < 1e-13


@pytest.mark.parametrize(("heads", "kv_heads", "pipeline"), [(8, 4, 2), (8, 8, 4), (4, 2, 2), (12, 6, 2)])
def test_heads_taken_in_parts(ranks, heads, kv_heads, pipeline):
    assert max(ranks.run(attention_parity, heads, kv_heads, pipeline)) < 1e-13


def uneven():
    init_parallel_state(device_type="cpu", sp=2)
    slice_input_tensor(torch.ones(3, 5), 1)


def test_a_length_that_does_not_divide_is_an_error(ranks, rank_failed):
    with pytest.raises(rank_failed, match=r"dim 1 of a tensor of shape \(3, 5\).*\n  to do: pad it"):
        ranks.run(uneven)
