"""FlashAttention 2, 3 and 4, with the libraries replaced."""

import importlib
import types

import pytest
import torch

from opslot import KERNEL_REGISTRY
from opslot._base.errors import KernelError
from opslot.ops._common import documents as documents_module
from opslot.ops.attention import op
from opslot.ops.attention.flash import make_flash
from tests.ops.attention.inputs import OPTIONS, Attention, documents, tensors


class Library:
    """flash_attn's two functions, computed by `op.reference`; options that no test expects raise."""

    def __init__(self):
        self.calls = []
        self.widths = []

    def flash_attn_func(self, q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), sinks=None, **options):
        self.widths.append(q.shape[-1])
        self.calls.append({"window_size": window_size, "causal": causal, **options})
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        kwargs = {"softcap": options["softcap"]} if options.get("softcap") else {}
        if window_size[0] >= 0:
            kwargs["sliding_window"] = window_size[0] + 1
        return op.reference(Attention(causal), q, k, v, None, scaling=softmax_scale, s_aux=sinks, **kwargs)[0]

    def flash_attn_varlen_func(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        assert max_seqlen_k == cu_seqlens_k.diff().max()
        spans = [torch.stack([c[:-1], c[1:]], 1).tolist() for c in (cu_seqlens_q, cu_seqlens_k)]
        outs = [
            self.flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], **options)
            for (a, b), (c, d) in zip(*spans, strict=True)
        ]
        return torch.cat([o[0] for o in outs])


@pytest.fixture
def flash(monkeypatch):
    library = Library()
    real = importlib.import_module
    stand_in = types.SimpleNamespace(
        flash_attn_func=library.flash_attn_func, flash_attn_varlen_func=library.flash_attn_varlen_func
    )
    monkeypatch.setattr(
        importlib,
        "import_module",
        lambda name, *a: stand_in if name.startswith(("flash_attn", "opslot.ops.attention.flash4")) else real(name, *a),
    )
    return library, make_flash


def test_flash_attention_4_or_triton_has_the_contract_of_the_op(flash, monkeypatch):
    pytest.importorskip("triton")
    from opslot.ops.attention import by_call

    # torch's check raises without a GPU.
    monkeypatch.setattr(by_call, "can_use_cudnn_attention", lambda params, debug: False)
    kernel = KERNEL_REGISTRY._make(KERNEL_REGISTRY.get("attention", "bidirectional", "flash_attention_4_or_triton"))
    q, k, v = tensors(length=1024, batch=1, dtype=torch.bfloat16)
    found, _ = kernel(Attention(False), q, k, v, None, scaling=0.25)
    expected, _ = op.reference(Attention(False), q, k, v, None, scaling=0.25)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.03)


FLASH_OPTIONS = OPTIONS | {
    "softcap": {"softcap": 2.0},
    "sinks": {"s_aux": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    "sinks and documents": {"s_aux": torch.tensor([0.5, -1.0, 3.0, 0.0])} | documents(20, 4, 24),
}


@pytest.mark.parametrize("options", FLASH_OPTIONS.values(), ids=FLASH_OPTIONS)
def test_flash_passes_every_option_on(flash, options):
    q, k, v = tensors(dtype=torch.bfloat16)
    options = {"scaling": 0.25} | options
    found, _ = flash[1](4)(Attention(), q, k, v, None, **options)
    expected, _ = op.reference(Attention(), q.double(), k.double(), v.double(), None, **options)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.03)


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_flash_attention_4_with_softcap_has_no_backward_of_documents(flash, form):
    q, k, v = (x.requires_grad_() for x in tensors(dtype=torch.bfloat16))
    mask = torch.ones(2, 24, dtype=torch.int64) if form == "padded" else None
    options = {"scaling": 0.25, "softcap": 2.0} | (documents(20, 4, 24) if form == "packed" else {})
    with pytest.raises(KernelError, match=r"(?s)'flash_attention_4' has no softcap in the backward.*hint: use triton"):
        flash[1](4)(Attention(), q, k, v, mask, **options)
    flash[1](2)(Attention(), q, k, v, mask, **options)
    with torch.no_grad():
        flash[1](4)(Attention(), q, k, v, mask, **options)
    flash[1](4)(Attention(), q, k, v, None, scaling=0.25, softcap=2.0)


@pytest.mark.parametrize(
    ("length", "width", "causal", "given", "expected"),
    [
        (24, 64, False, {}, "cudnn"),
        (24, 64, False, {"attention_mask": torch.ones(1, 24)}, "triton"),
        (24, 64, False, {"s_aux": torch.zeros(4)}, "triton"),
        (40, 64, False, {}, "flash"),
        (40, 72, False, {}, "cudnn"),
        (65, 72, False, {}, "flash"),
        (80, 64, False, documents(24, 24, 32), "triton"),
        (80, 64, False, documents(24, 40, 16), "flash"),
        (80, 64, False, {"sliding_window": 16}, "flash"),
        (24, 64, True, {}, "flash"),
        (80, 64, True, {"sliding_window": 16}, "triton"),
        (12, 64, True, {"sliding_window": 16}, "triton"),
        (80, 64, True, {"sliding_window": 17}, "flash"),
    ],
)
def test_length_and_window_select_flash_attention_4_or_triton(monkeypatch, length, width, causal, given, expected):
    pytest.importorskip("triton")
    from opslot.ops.attention import by_call

    called = []
    monkeypatch.setattr(by_call, "SHORT", 32)
    monkeypatch.setattr(by_call, "SHORT_IF_PADDED", 64)
    monkeypatch.setattr(by_call, "NARROW_WINDOW", 16)
    monkeypatch.setattr(by_call.triton, "attention", lambda *args, **kwargs: called.append("triton"))
    monkeypatch.setattr(by_call, "make_flash", lambda version: lambda *args, **kwargs: called.append("flash"))
    monkeypatch.setattr(by_call, "cudnn", lambda *args, **kwargs: called.append("cudnn"))
    monkeypatch.setattr(by_call, "can_use_cudnn_attention", lambda params, debug: True)
    q, k, v = tensors(length=length, width=width, batch=1)
    by_call.flash_4_or_triton()(Attention(causal), q, k, v, **{"attention_mask": None, "scaling": 0.25} | given)
    assert called == [expected]


@pytest.mark.parametrize(
    ("length", "given", "expected"),
    [
        (40, {}, "cudnn"),
        (31, {}, "triton"),
        (40, {"sliding_window": 40}, "cudnn"),
        (40, {"sliding_window": 39}, "triton"),
        (40, {"attention_mask": torch.ones(1, 40)}, "triton"),
        (40, documents(16, 24), "triton"),
    ],
    ids=str,
)
def test_whole_rows_select_cudnn_where_it_supports_them(monkeypatch, length, given, expected):
    pytest.importorskip("triton")
    from opslot.ops.attention import by_call

    called, asked = [], []
    monkeypatch.setattr(by_call, "_LONG", 32)
    monkeypatch.setattr(by_call, "cudnn", lambda *args, **kwargs: called.append("cudnn"))
    monkeypatch.setattr(by_call.triton, "attention", lambda *args, **kwargs: called.append("triton"))
    monkeypatch.setattr(
        by_call, "can_use_cudnn_attention", lambda params, debug: asked.append(params) or len(asked) == 1
    )
    q, k, v = tensors(length=length, batch=1)
    arguments = {"attention_mask": None, "scaling": 0.25} | given
    for _ in range(2):
        by_call.cudnn_or_triton(Attention(), q, k, v, **arguments)
    assert called == [expected, "triton"]


@pytest.mark.parametrize(
    ("offsets", "longest", "message"),
    [
        ([0, 20, 24, 41], None, "ends with 41 where there are 48 tokens"),
        ([0, 24, 48, 50], None, "ends with 50"),
        ([4, 24, 48], None, "not rising from 0"),
        ([0, 24, 20, 48], None, "not rising from 0"),
        ([], None, "not rising from 0"),
        ([0, 40, 48], None, "a document crosses token 24, where a row of 24 ends"),
        ([0, 24, 48], 23, "24 tokens, but max_length is 23"),
    ],
)
def test_flash_cu_seqlens_that_omit_tokens_raise(flash, offsets, longest, message):
    q, k, v = tensors(dtype=torch.bfloat16)
    given = {"cu_seq_lens_q": torch.tensor(offsets, dtype=torch.int32), "max_length_q": longest}
    with pytest.raises(KernelError, match=f"(?s)flash_attention_4.*cu_seq_lens_q.*{message}.*hint"):
        flash[1](4)(Attention(), q, k, v, None, **given)


def test_cu_seqlens_on_a_gpu_are_checked_once_without_sync(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "_assert_async", lambda right, message: asked.append((right, message)))

    def check(offsets, longest=None):
        documents_module._assert_on_device("kernel", "cu_seqlens", offsets, 2, 24, longest)

    offsets = torch.tensor([0, 24, 48])
    for _ in range(3):
        check(offsets, 24)
    check(offsets.mul_(1), 24)
    for wrong in ([0, 24, 47], [0, 47, 48], [1, 24, 48], [0, 30, 24, 48]):
        check(torch.tensor(wrong))
    check(offsets, 23)
    assert [bool(right) for right, _ in asked] == [True, True, False, False, False, False, False]
    assert "kernel: cu_seqlens does not cover 2 rows of 24 tokens" in asked[-1][1]


def test_flash_unpads_input_and_pads_output_with_zeros(flash):
    q, k, v = tensors(dtype=torch.bfloat16)
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[0, :5] = 0
    found, _ = flash[1](2)(Attention(), q, k, v, mask, scaling=0.25)
    alone, _ = op.reference(Attention(), *(x[:1, :, 5:] for x in (q, k, v)), None, scaling=0.25)
    assert torch.equal(found[0, :5], torch.zeros_like(found[0, :5]))
    assert torch.equal(found[:1, 5:], alone)


def test_flash_bidirectional_window_covers_both_sides(flash):
    library, make = flash
    make(2)(Attention(False), *tensors(dtype=torch.bfloat16), None, sliding_window=5)
    assert library.calls[-1]["window_size"] == (4, 4)


def test_sinks_of_float16_raise(flash):
    q, k, v = tensors(dtype=torch.float16)
    with pytest.raises(KernelError, match=r"(?s)has sinks in bfloat16 only.*found: query is torch.float16"):
        flash[1](4)(Attention(), q, k, v, None, scaling=0.25, s_aux=torch.zeros(4))


@pytest.mark.parametrize(
    ("version", "options", "message"),
    [
        (2, {"s_aux": torch.zeros(4)}, "'flash_attention_2' has no s_aux"),
        (3, {"s_aux": torch.zeros(4)}, "'flash_attention_3' has no s_aux"),
        (3, {"dropout": 0.1}, "flash_attention_3' has no dropout"),
        (4, {"dropout": 0.1}, "flash_attention_4' has no dropout"),
        (4, {"position_bias": torch.zeros(1)}, "'flash_attention_4' has no position_bias"),
    ],
)
def test_flash_unsupported_options_raise(flash, version, options, message):
    with pytest.raises(KernelError, match=message):
        flash[1](version)(Attention(), *tensors(dtype=torch.bfloat16), None, **options)


def test_flash_passes_deterministic_on(flash):
    library, make_flash = flash
    given = tensors(dtype=torch.bfloat16)
    for version in (2, 3):
        make_flash(version)(Attention(), *given, None, scaling=0.25, deterministic=True)
        make_flash(version)(Attention(), *given, None, scaling=0.25, deterministic=False)
    assert [call.get("deterministic", False) for call in library.calls] == [True, False] * 2
    make_flash(4)(Attention(), *given, None, scaling=0.25, deterministic=False)
    with pytest.raises(KernelError, match="'flash_attention_4' has no option deterministic"):
        make_flash(4)(Attention(), *given, None, scaling=0.25, deterministic=True)


def test_flash_fp32_raises(flash):
    with pytest.raises(KernelError, match=r"requires float16 or bfloat16\n  found: query is torch.float32"):
        flash[1](4)(Attention(), *tensors(), None)


@pytest.mark.parametrize(
    ("width", "value_width", "padded"), [(40, 40, 64), (72, 72, 96), (112, 112, 128), (48, 32, 64), (192, 128, 256)]
)
def test_flash_pads_head_sizes(flash, width, value_width, padded):
    """To those that FlashAttention 4 computes correctly, with the scale of the original size."""
    library, make = flash
    q, k, v = tensors(width=width, dtype=torch.bfloat16)
    v = v[..., :value_width]
    found, _ = make(4)(Attention(), q, k, v, None)
    expected, _ = op.reference(Attention(), q.double(), k.double(), v.double(), None)
    assert found.shape == (2, 24, 4, value_width)
    assert library.widths == [padded]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.03)
