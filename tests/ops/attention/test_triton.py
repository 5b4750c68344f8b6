"""The Triton attention kernel against the reference in float64: masks, head sizes, gradients, determinism."""

import itertools
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from opslot import KERNEL_REGISTRY
from opslot._base.device import DeviceFacts
from opslot._base.errors import KernelError
from opslot.ops.attention import op
from opslot.ops.attention.triton import attend, attention, head_tiles
from opslot.slots import KernelRequest
from opslot.verify.parity import CheckResult, compare, expect

LABEL = CheckResult("attention", "causal", "triton", "case", "float32")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Attention(nn.Module):
    def __init__(self, causal=True):
        super().__init__()
        self.is_causal = causal


def tensors(batch=1, length=70, keys=None, heads=4, kv_heads=2, width=32, v_width=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def projected(tokens, count, size):
        return torch.randn(batch, tokens, count, size, generator=generator, dtype=torch.float64).transpose(1, 2)

    keys = keys or length
    shapes = ((length, heads, width), (keys, kv_heads, width), (keys, kv_heads, v_width or width))
    return [projected(*shape).to(DEVICE, dtype) for shape in shapes]


def boundaries(*lengths):
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


def spans(cu_seqlens, row, length, tokens):
    """Start and end of each document within a row; tokens after the last document are another one."""
    ends = [*cu_seqlens.tolist(), tokens]
    clipped = [min(max(end - row * length, 0), length) for end in ends]
    return list(itertools.pairwise(clipped))


def visible(batch, length, keys, causal=True, window=None, cu_q=None, cu_k=None):
    """Bool mask [B, 1, S, S_kv], from the definition of each option."""
    mask = torch.zeros(batch, 1, length, keys, dtype=torch.bool)
    for row in range(batch):
        of_q = [(0, length)] if cu_q is None else spans(cu_q, row, length, batch * length)
        of_k = [(0, keys)] if cu_k is None else spans(cu_k, row, keys, batch * keys)
        for (q_start, q_end), (k_start, k_end) in zip(of_q, of_k, strict=True):
            at = torch.arange(q_end - q_start)[:, None] + (k_end - k_start) - (q_end - q_start)
            key = torch.arange(k_end - k_start)
            seen = at >= key if causal else torch.ones(len(at), len(key), dtype=torch.bool)
            if window is not None:
                seen = seen & (at - key < window) & (key - at < window)
            mask[row, 0, q_start:q_end, k_start:k_end] = seen
    return mask.to(DEVICE)


def expected(q, k, v, mask, **kwargs):
    """The reference; rows that see no key are zero."""
    sees = mask.any(-1, keepdim=True)
    out, _ = op.reference(Attention(), q, k, v, mask | ~sees, **kwargs)
    return torch.where(sees.transpose(1, 2), out, 0.0)


CASES = {
    "causal": ({}, {}),
    "one query head per key head": ({"heads": 2}, {}),
    "three query heads per key head": ({"heads": 3, "kv_heads": 1, "batch": 2, "length": 37}, {}),
    "bidirectional": ({"batch": 2}, {"causal": False}),
    "window": ({}, {"window": 9}),
    "window of two": ({}, {"window": 2}),
    "window longer than the sequence": ({}, {"window": 500}),
    "bidirectional window": ({}, {"window": 9, "causal": False}),
    "fewer queries than keys": ({"length": 5, "keys": 40}, {}),
    "fewer queries than keys, window": ({"length": 9, "keys": 40}, {"window": 6}),
    "more queries than keys": ({"length": 40, "keys": 9}, {}),
    "one query": ({"length": 1, "keys": 40}, {}),
    "cross attention": ({"length": 20, "keys": 33}, {"causal": False}),
    "documents": ({}, {"documents": (7, 1, 30, 0, 32)}),
    "documents, bidirectional": ({}, {"documents": (7, 1, 30, 32), "causal": False}),
    "documents, window": ({}, {"documents": (7, 1, 30, 32), "window": 4}),
    "documents in two rows": ({"batch": 2, "length": 20}, {"documents": (12, 8, 5, 15)}),
    "documents that cross rows": ({"batch": 2, "length": 20}, {"documents": (12, 15, 13)}),
    "tokens after the last document": ({"batch": 2, "length": 20}, {"documents": (12, 8, 5)}),
    "documents with more keys": (
        {"length": 20, "keys": 40},
        {"documents": (8, 12), "key_documents": (10, 30), "window": 6},
    ),
    "documents with other keys": (
        {"length": 20, "keys": 40},
        {"documents": (8, 12), "key_documents": (15, 25), "causal": False},
    ),
    "q and k wider than v": ({"length": 40, "width": 192, "v_width": 128}, {}),
    "v wider than q and k": ({"length": 40, "width": 24, "v_width": 40}, {}),
    **{f"head size {width}": ({"length": 35, "width": width}, {}) for width in (8, 20, 72, 80, 96, 112, 160, 256)},
}


def run(case, options):
    """Output and gradients of the kernel in float32 and of the reference in float64."""
    given, masks = CASES[case]
    masks = dict(masks)
    causal, window = masks.get("causal", True), masks.get("window")
    cu_q = boundaries(*masks["documents"]) if "documents" in masks else None
    cu_k = boundaries(*masks["key_documents"]) if "key_documents" in masks else cu_q
    leaves = [x.requires_grad_() for x in tensors(**given)]
    q, k, v = leaves
    mask = visible(q.shape[0], q.shape[2], k.shape[2], causal, window, cu_q, cu_k)
    wanted = expected(q, k, v, mask, **options)
    sinks = options.get("s_aux")
    leaves += [] if sinks is None else [sinks]
    dout = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(DEVICE)
    wanted_gradients = torch.autograd.grad(wanted, leaves, dout)
    singles = [x.detach().float().requires_grad_() for x in leaves]
    found = attend(
        *(x.transpose(1, 2) for x in singles[:3]),
        cu_q,
        cu_k,
        singles[3] if sinks is not None else None,
        q.shape[-1] ** -0.5,
        causal,
        window,
        options.get("softcap"),
    )
    return (found, *torch.autograd.grad(found, singles, dout.float())), (wanted, *wanted_gradients)


def assert_close(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=4e-6 * y.abs().max().item())


@pytest.mark.quick(
    "causal",
    "bidirectional",
    "window",
    "three query heads*",
    "one query",
    "cross attention",
    "documents, window",
    "documents that cross rows",
    "documents with*",
    "q and k wider*",
    "head size 20",
    "head size 96",
)
@pytest.mark.parametrize("case", CASES)
def test_masks_and_head_sizes(case):
    assert_close(*run(case, {}))


@pytest.mark.quick("documents", "three query*")
@pytest.mark.parametrize("case", ["window", "documents", "three query heads per key head", "q and k wider than v"])
def test_sinks_and_their_gradient(case):
    heads = CASES[case][0].get("heads", 4)
    sinks = torch.linspace(-1, 2, heads, dtype=torch.float64, device=DEVICE).requires_grad_()
    assert_close(*run(case, {"s_aux": sinks}))


@pytest.mark.quick("documents, window-0.5", "causal-50.0")
@pytest.mark.parametrize("softcap", [0.5, 50.0])
@pytest.mark.parametrize("case", ["causal", "documents, window"])
def test_softcap(case, softcap):
    assert_close(*run(case, {"softcap": softcap}))


def test_a_query_that_only_sees_itself():
    """Its weight is 1, so the gradients of q and k are zero up to rounding."""
    q, k, v = (x.float().requires_grad_() for x in tensors())
    out = attend(*(x.transpose(1, 2) for x in (q, k, v)), window=1)
    dq, dk, _ = torch.autograd.grad(out.square().sum(), (q, k, v))
    torch.testing.assert_close(out, v.repeat_interleave(2, 1).transpose(1, 2), rtol=1e-6, atol=1e-6)
    assert max(dq.abs().max(), dk.abs().max()) < 1e-4


@pytest.mark.parametrize("options", [{}, {"sliding_window": 9}, {"is_causal": False}, {"softcap": 5.0}])
def test_equals_the_reference_within_the_bound_of_checks(options):
    arguments = {
        "module": Attention(),
        **dict(zip(("query", "key", "value"), tensors(batch=2, length=40, dtype=torch.float32), strict=True)),
        "attention_mask": None,
        "scaling": 0.3,
        **options,
    }
    result = compare(attention, expect(op.OP.variant("causal"), arguments, 0), LABEL)
    assert result.ok, str(result)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_dtypes(dtype):
    q, k, v = tensors(length=40, dtype=dtype)
    out, _ = attention(Attention(), q, k, v, None, sliding_window=9)
    wanted, _ = op.reference(Attention(), q.double(), k.double(), v.double(), None, sliding_window=9)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), wanted, rtol=0, atol=2 * torch.finfo(dtype).eps * wanted.abs().max().item()
    )


def test_padding_mask():
    """Padded tokens are not seen, and their outputs and gradients are zero."""
    q, k, v = (x.requires_grad_() for x in tensors(batch=3, length=20))
    mask = torch.ones(3, 20, dtype=torch.int64, device=DEVICE)
    mask[0, :6] = 0
    mask[1, 13:] = 0
    full = visible(3, 20, 20) & mask.bool()[:, None, None, :] & mask.bool()[:, None, :, None]
    wanted = expected(q, k, v, full)
    singles = [x.detach().float().requires_grad_() for x in (q, k, v)]
    found, _ = attention(Attention(), *singles, mask)
    dout = torch.randn_like(wanted)
    assert_close(
        (found, *torch.autograd.grad(found, singles, dout.float())),
        (wanted, *torch.autograd.grad(wanted, (q, k, v), dout)),
    )


def test_padding_mask_with_fewer_queries_than_keys():
    q, k, v = tensors(batch=2, length=3, keys=20)
    mask = torch.ones(2, 20, dtype=torch.bool, device=DEVICE)
    mask[0, :6] = False
    wanted = expected(q, k, v, visible(2, 3, 20) & mask[:, None, None, :])
    found, _ = attention(Attention(), q.float(), k.float(), v.float(), mask)
    assert_close((found,), (wanted,))


def test_packed_equals_separate_bit_for_bit():
    """A document's results do not depend on the others, if it starts at the same place of a block."""
    q, k, v = (x.float().transpose(1, 2) for x in tensors(length=60, heads=2))
    packed = attend(q, k, v, boundaries(40, 20), boundaries(40, 20))
    alone = attend(q[:, :40], k[:, :40], v[:, :40])
    assert torch.equal(packed[:, :40], alone)


def test_deterministic():
    first, second = (run("documents, window", {})[0] for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_strided_inputs():
    q, k, v = (x.float() for x in tensors())
    strided = [x.mT.contiguous().mT.requires_grad_() for x in (q, k, v)]
    assert strided[0].stride(-1) != 1
    plain = [x.clone().requires_grad_() for x in (q, k, v)]
    found, wanted = (attention(Attention(), *given, None)[0] for given in (strided, plain))
    assert torch.equal(found, wanted)
    for x, y in zip(torch.autograd.grad(found.sum(), strided), torch.autograd.grad(wanted.sum(), plain), strict=True):
        assert torch.equal(x, y)


def test_strided_boundaries_and_sinks():
    q, k, v = tensors(dtype=torch.float32)
    cu_seqlens, sinks = boundaries(7, 1, 0, 50, 12), torch.randn(4, device=DEVICE)
    padded = torch.stack((cu_seqlens, cu_seqlens + 9), 1)[:, 0]
    expected = attention(Attention(), q, k, v, None, cu_seq_lens_q=cu_seqlens, s_aux=sinks)[0]
    strided = {"cu_seq_lens_q": padded, "s_aux": torch.stack((sinks, sinks + 5), 1)[:, 0]}
    assert not padded.is_contiguous()
    assert torch.equal(attention(Attention(), q, k, v, None, **strided)[0], expected)


@pytest.mark.parametrize("needed", [0, 1, 2])
def test_gradient_of_one_argument(needed):
    leaves = [x.float() for x in tensors(length=33)]
    everything = [x.clone().requires_grad_() for x in leaves]
    out, _ = attention(Attention(), *everything, None)
    wanted = torch.autograd.grad(out.square().sum(), everything)[needed]
    leaves[needed].requires_grad_()
    out, _ = attention(Attention(), *leaves, None)
    (found,) = torch.autograd.grad(out.square().sum(), leaves[needed])
    assert torch.equal(found, wanted)


def test_no_tokens():
    q, k, v = (x.float().requires_grad_() for x in tensors(batch=2, length=4))
    out, _ = attention(Attention(), q[:, :, :0], k[:, :, :0], v[:, :, :0], None)
    assert out.shape == (2, 0, 4, 32)
    out, _ = attention(Attention(False), q, k[:, :, :0], v[:, :, :0], None)
    assert out.shape == (2, 4, 4, 32)
    assert not out.any()
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert not dq.any()


@pytest.mark.quick("None")
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_with_fullgraph(dynamic):
    torch._dynamo.reset()
    sinks = torch.zeros(4, device=DEVICE).requires_grad_()

    def step(q, k, v, cu_seqlens):
        return attention(
            Attention(),
            q,
            k,
            v,
            None,
            sliding_window=5,
            s_aux=sinks,
            cu_seq_lens_q=cu_seqlens,
            cu_seq_lens_k=cu_seqlens,
        )[0]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (24, 17):
        leaves = [x.float().requires_grad_() for x in tensors(length=length)]
        found, wanted = (f(*leaves, boundaries(7, length - 7)) for f in (compiled, step))
        assert torch.equal(found, wanted)
        for x, y in zip(
            torch.autograd.grad(found.sum(), [*leaves, sinks]),
            torch.autograd.grad(wanted.sum(), [*leaves, sinks]),
            strict=True,
        ):
            assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dropout": 0.1}, "has no dropout"),
        ({"position_bias": torch.zeros(1)}, "'triton' has no position_bias"),
        ({"attention_mask": torch.zeros(1, 1, 70, 70)}, "it has 4 dimensions"),
        ({"scaling": -1.0}, "cannot take scaling: it is -1.0"),
        ({"query": torch.zeros(1, 4, 70, 32, dtype=torch.float64)}, "its dtype is torch.float64"),
        ({"key": torch.zeros(1, 2, 70, 32, dtype=torch.bfloat16)}, "cannot take key: it is torch.bfloat16"),
        ({"query": torch.zeros(1, 4, 70, 320), "key": torch.zeros(1, 2, 70, 320)}, "its head size is 320"),
        ({"key": torch.zeros(1, 3, 70, 32), "value": torch.zeros(1, 3, 70, 32)}, "4 query heads"),
        ({"key": torch.zeros(2, 2, 70, 32)}, r"cannot take key: its shape is \(2, 2, 70, 32\) beside query's"),
        ({"value": torch.zeros(1, 1, 70, 32)}, r"cannot take value: its shape is \(1, 1, 70, 32\) beside key's"),
        ({"value": torch.zeros(1, 2, 69, 32)}, "cannot take value"),
        ({"s_aux": torch.zeros(2)}, "cannot take s_aux: its shape is"),
        ({"cu_seq_lens_q": boundaries(70), "cu_seq_lens_k": boundaries(30, 40)}, "it has 3 boundaries beside 2"),
    ],
)
def test_unsupported_arguments_raise(change, message):
    names = ("query", "key", "value")
    arguments = dict(zip(names, (x.float() for x in tensors()), strict=True)) | {"attention_mask": None} | change
    with pytest.raises(KernelError, match=message):
        attention(Attention(), **arguments)


def test_errors_name_the_kernel_that_is_bound():
    query, key, value = (x.double() for x in tensors())
    kernel = KERNEL_REGISTRY.load("attention", "causal", "batch_invariant")
    with pytest.raises(KernelError, match="attn_implementation='batch_invariant' cannot take query"):
        kernel(Attention(), query, key, value, None)


def test_head_tiles_cover_the_head_with_the_fewest_columns():
    assert [head_tiles(width) for width in (8, 16, 24, 32, 48, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256)] == [
        *((16, 0), (16, 0), (32, 0), (32, 0), (32, 16), (64, 0), (64, 16), (64, 16), (64, 32), (128, 0), (128, 0)),
        *((128, 32), (128, 64), (256, 0), (256, 0)),
    ]


@pytest.mark.parametrize(
    ("capability", "config", "chosen"),
    [
        ((9, 0), {"head_dim": 128}, "cudnn"),
        ((9, 0), {"head_dim": 256}, "cudnn_or_triton"),
        ((9, 0), {"head_dim": 64, "sliding_window": 128}, "triton"),
        ((8, 0), {"head_dim": 256}, "sdpa"),
    ],
)
def test_auto_without_flash_attention_4(capability, config, chosen):
    if find_spec("flash_attn") is not None:
        pytest.skip("FlashAttention is installed")
    config = PreTrainedConfig(hidden_size=512, num_attention_heads=2, num_key_value_heads=2, **config)
    request = KernelRequest("attention", "causal", DeviceFacts("gpu", capability), torch.bfloat16, config=config)
    assert KERNEL_REGISTRY.resolve(request).chosen == chosen


@pytest.mark.quick("True-*softcap*", "False-*window*")
@pytest.mark.parametrize("options", [{}, {"sliding_window": 20}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_batch_invariant_does_not_depend_on_other_documents(options, causal):
    kernel = KERNEL_REGISTRY.load("attention", "causal", "batch_invariant")
    generator = torch.Generator().manual_seed(0)
    lengths, heads_of = ([9, 130, 5, 40], (6, 2, 2)) if DEVICE == "cuda" else ([9, 70, 5], (2, 1, 1))
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(DEVICE)
    inputs = [
        torch.randn(1, heads, sum(lengths), 16, generator=generator).to(DEVICE).requires_grad_() for heads in heads_of
    ]
    dout = torch.randn(1, sum(lengths), heads_of[0], 16, generator=generator).to(DEVICE)

    def forward_backward(tokens, cu_seqlens):
        parts = [x.detach()[:, :, tokens].requires_grad_() for x in inputs]
        out, _ = kernel(Attention(causal), *parts, None, cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, **options)
        return out.detach(), torch.autograd.grad(out, parts, dout[:, tokens])

    out, gradients = forward_backward(slice(None), cu)
    for first, last in itertools.pairwise(cu.tolist()):
        alone, alone_gradients = forward_backward(slice(first, last), None)
        assert torch.equal(alone, out[:, first:last])
        for found, expected in zip(alone_gradients, gradients, strict=True):
            torch.testing.assert_close(found, expected[:, :, first:last], rtol=1e-5, atol=1e-5)
