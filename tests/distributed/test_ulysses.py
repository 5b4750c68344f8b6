"""Sequence parallelism on two ranks compared with one process, values and gradients, in fp64."""

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
    """Both directions move the right elements, and their backward is the inverse."""
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


def test_gather_seq_scatter_heads_and_back(ranks):
    assert ranks.run(transposes) == [0.0, 0.0]


def gather_and_slice():
    """sum over ranks of loss_r(gather(slice(x))) has the gradient of one process that sums those losses."""
    rank = init_parallel_state(device_type="cpu", sp=2).sp_rank
    full = random(3, 7, 2)
    weights = [random(3, 7, 2, seed=s) for s in (1, 2)]
    x = full.clone().requires_grad_()
    local = sp_pad_and_slice(x, 1, pad_value=9.0, pad_scale=2)
    assert local.shape == (3, 4, 2)
    whole = gather_outputs(local * local, 1, unpadded_size=7)
    (whole * weights[rank]).sum().backward()
    # Each rank has a copy of x, so the gradient is the sum over ranks.
    torch.distributed.all_reduce(x.grad)
    return torch.equal(whole, full * full), (x.grad - 2 * full * sum(weights)).abs().max().item()


def test_gather_and_slice_gradients_are_of_the_summed_loss(ranks):
    for equal, error in ranks.run(gather_and_slice):
        assert equal
        assert error < 1e-14


def test_single_process_returns_its_input():
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
    ("call", "message"),
    [
        (partial(gather_seq_scatter_heads, seq_dim=1, head_dim=-2), r"dim 1 of .* both the sequence and the heads"),
        (partial(gather_seq_scatter_heads, seq_dim=1, head_dim=3), r"has no dim 3\n  hint: give one of -3 to 2"),
        (partial(gather_heads_scatter_seq, head_dim=-4, seq_dim=0), "has no dim -4"),
        (partial(gather_outputs, dim=3), "has no dim 3"),
        (partial(sp_pad_and_slice, dim=0, pad_scale=0), "pad_scale=0 must be at least 1"),
        (partial(unpad_tensor, dim=1, size=6), r"\(2, 5, 3\) has no first 6 elements\n  hint: pass the size"),
        (partial(unpad_tensor, dim=1, size=-1), "has no first -1 elements"),
    ],
)
def test_invalid_dims_and_sizes_raise(call, message):
    with pytest.raises(ConfigError, match=message):
        call(random(2, 5, 3))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sp", "repeats"),
    [(8, 8, 2, 1), (8, 2, 2, 1), (8, 2, 4, 2), (8, 1, 8, 8), (12, 4, 6, 3), (12, 6, 4, 2)],
)
def test_key_value_heads_are_repeated_until_they_divide(heads, kv_heads, sp, repeats):
    assert kv_repeats(heads, kv_heads, sp) == repeats


@pytest.mark.parametrize(("heads", "kv_heads", "sp"), [(6, 2, 4), (12, 4, 8)])
def test_indivisible_heads_raise_with_fitting_sizes(heads, kv_heads, sp):
    with pytest.raises(
        ConfigError, match=rf"sp={sp} does not divide {heads} query heads.*\n  hint: use one of 1, 2, 3?"
    ):
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
    """Packed documents across rank boundaries: output and gradients compared with one process."""
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
def test_attention_over_the_global_sequence(ranks, heads, kv_heads):
    assert max(ranks.run(attention_parity, heads, kv_heads)) < 1e-13


@pytest.mark.parametrize(("heads", "kv_heads", "pipeline"), [(8, 4, 2), (8, 8, 4), (4, 2, 2), (12, 6, 2)])
def test_heads_in_chunks(ranks, heads, kv_heads, pipeline):
    assert max(ranks.run(attention_parity, heads, kv_heads, pipeline)) < 1e-13


class Causal(torch.nn.Module):
    """A minimal attention module."""

    is_causal = True


def flash_like(q, k, v, softmax_scale, causal, window_size=(-1, -1), cu_seqlens_q=None, cu_seqlens_k=None, **lengths):
    """FlashAttention's two functions in plain torch: [B, S, heads, D], or [tokens, heads, D] with cu_seqlens."""
    packed = cu_seqlens_q is not None
    assert packed == (q.dim() == 3) == bool(lengths)
    assert not packed or lengths["max_seqlen_q"] >= cu_seqlens_q.diff().max()
    q, k, v = (x[None] if packed else x for x in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.repeat_interleave(n, 2).transpose(1, 2) for x, n in ((q, 1), (k, groups), (v, groups)))
    token = torch.arange(q.shape[2])
    distance = token[:, None] - token
    allowed = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window_size[0] >= 0:
        allowed = allowed & (distance <= window_size[0])
    if packed:
        document = torch.searchsorted(cu_seqlens_q[1:].long(), token, right=True)
        allowed = allowed & (document[:, None] == document)
    scores = (q @ k.mT * softmax_scale).masked_fill(~allowed, float("-inf"))
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    return (out[0] if packed else out), None


def kernel_named(name):
    """The registered kernel; FlashAttention's adapter uses `flash_like` instead of a library that requires a GPU."""
    if name != "flash":
        from opslot.slots import KERNEL_REGISTRY

        variant = KERNEL_REGISTRY.op("attention").variant("causal")
        return variant.reference if name == "eager" else KERNEL_REGISTRY.load("attention", "causal", name)
    import types

    from opslot.ops.attention import flash

    library = types.SimpleNamespace(flash_attn_func=flash_like, flash_attn_varlen_func=flash_like)
    flash.importlib = types.SimpleNamespace(import_module=lambda _: library)
    flash.torch = types.SimpleNamespace(float16=torch.float16, bfloat16=torch.float64)
    return flash.make_flash(4)


def kernel_parity(name, documents, window):
    """Largest error of output and gradients with sequence parallelism against the reference in one process."""

    rank = init_parallel_state(device_type="cpu", sp=2).sp_rank
    torch.compiler.set_stance("force_eager")
    batch, length, width = (1, 32, 16) if window else (2, 32, 16)
    dtype = torch.float32 if name == "flex_attention" else torch.float64
    options = {"scaling": 0.25, "sliding_window": window}
    if documents:
        cu_seqlens = torch.tensor([0, *documents]).cumsum(0).to(torch.int32)
        options |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        options |= {"max_length_q": max(documents), "max_length_k": max(documents)}
    full = [random(batch, n, length, width, seed=s).to(dtype) for s, n in enumerate((4, 2, 2))]
    weight = random(batch, length, 4, width, seed=9).to(dtype)
    whole = [x.clone().requires_grad_() for x in full]
    expected, _ = kernel_named("eager")(Causal(), *whole, None, **options)
    (expected * weight).sum().backward()
    # torch has no backward for FlexAttention on CPUs.
    forward_only = name == "flex_attention"
    local = [part(x, 2, rank).clone().requires_grad_(not forward_only) for x in full]
    found, _ = ulysses_attention(kernel_named(name))(Causal(), *local, None, **options)
    errors = [(found - part(expected, 1, rank)).abs().max()]
    if forward_only:
        return errors[0].item()
    (found * part(weight, 1, rank)).sum().backward()
    errors += [(x.grad - part(y.grad, 2, rank)).abs().max() for x, y in zip(local, whole, strict=True)]
    return max(e.item() for e in errors)


@pytest.mark.quick("None-documents-eager", "None-whole rows-flash", "5-documents-sdpa", "None-documents-flex_attention")
@pytest.mark.parametrize("name", ["eager", "sdpa", "flash", "flex_attention"])
@pytest.mark.parametrize("documents", [(), (7, 25, 20, 12)], ids=["whole rows", "documents"])
@pytest.mark.parametrize("window", [None, 5])
def test_every_attention_kernel(ranks, name, documents, window):
    documents = documents[:2] if window else documents
    error = max(ranks.run(kernel_parity, name, documents, window))
    assert error < (1e-5 if name == "flex_attention" else 1e-13)


def uneven():
    init_parallel_state(device_type="cpu", sp=2)
    slice_input_tensor(torch.ones(3, 5), 1)


def test_indivisible_length_raises(ranks, rank_failed):
    with pytest.raises(rank_failed, match=r"dim 1 of a tensor of shape \(3, 5\).*\n  hint: pad it"):
        ranks.run(uneven)
