"""attention: each option of a call is computed correctly or raises, and SDPA never runs its math backend."""

import dataclasses
import itertools
import math
import types

import pytest
import torch
from torch import nn

from opslot import KERNEL_REGISTRY
from opslot._base.device import CPU, DeviceFacts
from opslot._base.errors import ConfigError, KernelError
from opslot._base.tensor_cache import TensorCache
from opslot.ops import attention
from opslot.ops.attention import op
from opslot.ops.attention.cases import CASES
from opslot.ops.attention.reference import unpack_bits, visible
from opslot.ops.attention.sdpa import sdpa
from opslot.slots import KernelRequest, Resolution, SlotBinding
from tests.ops.attention.inputs import OPTIONS, Attention, documents, tensors

HOPPER = DeviceFacts("gpu", (9, 0), "a Hopper")


def load(name):
    return KERNEL_REGISTRY.load("attention", "causal", name)


def expected_mask(length, keys, causal=True, window=None, lengths=None):
    mask = torch.zeros(length, keys, dtype=torch.bool)
    bounds = torch.tensor([0, *(lengths or [max(length, keys)])]).cumsum(0)
    for i in range(length):
        for j in range(keys):
            at = i + keys - length
            document = torch.searchsorted(bounds, at, right=True) == torch.searchsorted(bounds, j, right=True)
            near = window is None or (at - j < window if causal else abs(at - j) < window)
            mask[i, j] = document and near and (j <= at or not causal)
    return mask


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 5, 24])
@pytest.mark.parametrize("lengths", [None, [7, 1, 16]])
def test_visible_keys(causal, window, lengths):
    q, k, _ = tensors(batch=1)
    kwargs = {"sliding_window": window} | (documents(*lengths) if lengths else {})
    found = visible(Attention(causal), q, k, kwargs)
    expected = expected_mask(24, 24, causal, window, lengths)
    assert torch.equal(expected if found is None else found[0, 0], expected)


def test_last_query_attends_to_every_key():
    q, k, _ = tensors(length=3, keys=8)
    assert torch.equal(visible(Attention(), q, k, {})[0, 0], expected_mask(3, 8))


@pytest.mark.parametrize("keys", [24, 40])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_sdpa_supports_every_option(options, keys):
    if keys != 24 and "cu_seq_lens_q" in options:
        pytest.skip("documents have as many keys as queries")
    q, k, v = tensors(keys=keys, dtype=torch.float64)
    found, _ = load("sdpa")(Attention(), q, k, v, None, **options)
    expected, _ = op.reference(Attention(), q, k, v, None, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 5}, documents(20, 4), documents(20, 4) | {"sliding_window": 3}]
)
def test_strided_channels(options):
    q, k, v = (x[:1].mT.contiguous().mT for x in tensors(dtype=torch.float64))
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 24
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found, expected = (f(Attention(), *leaves, None, **options)[0] for f in (load("sdpa"), op.reference))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(out.square().sum(), leaves) for out in (found, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-11)


def test_tokens_after_the_last_document_form_a_document():
    q, k, v = tensors(dtype=torch.float64)
    found, _ = load("sdpa")(Attention(), q, k, v, None, **documents(20, 4, 17))
    expected, _ = op.reference(Attention(), q, k, v, None, **documents(20, 4, 17, 7))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_output_of_packed_documents_is_contiguous():
    """Models take views of it."""
    q, k, v = (x[:1] for x in tensors(dtype=torch.float64))
    found, _ = load("sdpa")(Attention(), q, k, v, None, **documents(10, q.shape[2] - 10))
    assert found.is_contiguous()


def test_documents_do_not_cross_batch_rows():
    q, k, v = tensors(dtype=torch.float64)
    found, _ = load("sdpa")(Attention(), q, k, v, None, **documents(40, 8))
    expected, _ = op.reference(Attention(), q, k, v, None, **documents(24, 16, 8))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.quick("None")
@pytest.mark.parametrize("dynamic", [None, True])
def test_sdpa_compiles_with_fullgraph_at_several_lengths(dynamic):
    torch._dynamo.reset()
    module = Attention()
    compiled = torch.compile(load("sdpa"), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (24, 17, 9):
        given = tensors(length=length)
        torch.testing.assert_close(compiled(module, *given, None)[0], load("sdpa")(module, *given, None)[0])


def test_v_head_dim_smaller_than_qk_head_dim():
    q, k, v = tensors(dtype=torch.float64)
    found, _ = load("sdpa")(Attention(), q, k, v[..., :10], None)
    expected, _ = op.reference(Attention(), q, k, v[..., :10], None)
    assert found.shape == (2, 24, 4, 10)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scaling", [None, 0.3])
def test_v_head_dim_larger_than_qk_head_dim(scaling):
    q, k, v = tensors(dtype=torch.float64)
    found, _ = load("sdpa")(Attention(), q[..., :10], k[..., :10], v, None, scaling=scaling)
    expected, _ = op.reference(Attention(), q[..., :10], k[..., :10], v, None, scaling=scaling)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_additive_mask_is_applied_once():
    q, k, v = tensors(dtype=torch.float64)
    mask = torch.rand(2, 1, 24, 24, generator=torch.Generator().manual_seed(1)) < 0.6
    mask |= torch.eye(24, dtype=torch.bool)
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    expected, _ = op.reference(Attention(), q, k, v, mask)
    for given in (mask, added):
        found, _ = load("sdpa")(Attention(), q, k, v, given, sliding_window=5)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 50.0}, "'sdpa' has no softcap\n  hint: use eager"),
        ({"s_aux": torch.zeros(4)}, "'sdpa' has no s_aux\n  hint: use eager, triton or flash_attention_4"),
        ({"position_bias": torch.zeros(1, 4, 24, 24)}, "'sdpa' has no position_bias"),
    ],
)
def test_sdpa_unsupported_options_raise(options, message):
    with pytest.raises(KernelError, match=message):
        load("sdpa")(Attention(), *tensors(), None, **options)


def test_cpu_dropout_raises_with_the_reason_of_torch():
    with pytest.raises(KernelError, match=r"(?s)no fused backend .*dropout.*set attention_dropout to 0"):
        load("sdpa")(Attention(), *tensors(), None, dropout=0.1)


def test_cudnn_never_falls_back_to_another_backend():
    """Without cuDNN it raises one error, in either of torch's wordings."""
    with pytest.raises(KernelError, match="'cudnn': no fused backend of torch supports query"):
        load("cudnn")(Attention(), *tensors(), None)


def test_sdpa_on_cpu_never_runs_the_math_backend():
    """The profiler shows the fused CPU kernel."""
    q, k, v = tensors()
    with torch.profiler.profile() as profile:
        load("sdpa")(Attention(), q, k, v, None)
        load("sdpa")(Attention(), q, k, v, None, **documents(20, 4, 24))
    names = [event.name for event in profile.events()]
    assert names.count("aten::_scaled_dot_product_flash_attention_for_cpu") == 4
    assert "aten::_scaled_dot_product_attention_math" not in names


def test_trained_bias_gets_its_gradient_on_cpu():
    """The CPU's fused attention gives none, and the bias is as large as the scores."""
    gradients = []
    for function in (load("sdpa"), op.reference):
        q, k, v = tensors(kv_heads=4)
        bias = torch.zeros(2, 4, 24, 24, requires_grad=True)
        out, _ = function(Attention(), q, k, v, bias)
        (out * torch.arange(16)).sum().backward()
        gradients.append(bias.grad)
    assert gradients[1].abs().max() > 0
    torch.testing.assert_close(*gradients)


def test_reference_sinks_equal_an_extra_key():
    q, k, v = tensors(dtype=torch.float64)
    sinks = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found, _ = op.reference(Attention(), q, k, v, None, s_aux=sinks)
    # A sink is a key whose score is the sink and whose value is zero.
    bare, _ = op.reference(Attention(), q, k, v, None)
    scores = q @ k.repeat_interleave(2, 1).mT / 4
    lse = scores.masked_fill(~expected_mask(24, 24), float("-inf")).logsumexp(-1)
    weight = torch.exp(lse - torch.logaddexp(lse, sinks[:, None]))
    torch.testing.assert_close(found, bare * weight.transpose(1, 2)[..., None], rtol=0, atol=1e-12)


# FlashAttention's adapter, with a fake library that computes the reference


# Checks when a model is bound


class MatchedAttention(nn.Module):
    """As a class that discovery matched: the options that it passes, and the attributes that hold them."""

    _opslot_attention_options = (
        "causal",
        {
            "sliding_window": "sliding_window",
            "softcap": "attn_logit_softcapping",
            "s_aux": "sinks",
            "dropout": "attention_dropout",
        },
    )

    def __init__(self, config, **attributes):
        super().__init__()
        self.config = config
        for name, value in attributes.items():
            setattr(self, name, value)


def request(device=CPU, flags=(), layers=({},), **config):
    class Model(nn.Module):
        pass

    model = Model()
    for flag in flags:
        setattr(Model, flag, False)
    values = types.SimpleNamespace(**({"hidden_size": 64, "num_attention_heads": 4} | config))
    values.get_text_config = lambda: values
    model.config = values
    model.layers = nn.ModuleList(MatchedAttention(values, **attributes) for attributes in layers)
    return KernelRequest("attention", "causal", device, torch.bfloat16, model, model.config)


SINKS = ({"sinks": None}, {"sinks": nn.Parameter(torch.zeros(4))})
MLA = ({"qk_head_dim": 192, "v_head_dim": 128},)


@pytest.mark.parametrize(
    ("given", "kernel", "reason"),
    [
        ({"attn_logit_softcapping": 50.0}, "sdpa", "has no softcap, this model's is 50.0"),
        ({"layers": SINKS}, "sdpa", "has no attention sinks"),
        ({"attention_dropout": 0.1}, "sdpa", "has no dropout, this model's attention_dropout is 0.1"),
        ({"flags": ("_supports_sdpa",)}, "sdpa", "Transformers does not let Model use it"),
        # The flag of Transformers does not say why.
        ({"flags": ("_supports_sdpa",), "layers": SINKS}, "sdpa", "has no attention sinks"),
        ({"flags": ("_supports_sdpa",), "attn_logit_softcapping": 50.0}, "sdpa", "has no softcap"),
        ({"device": HOPPER, "flags": ("_supports_sdpa",), "layers": SINKS}, "cudnn", "has no attention sinks"),
        (
            {"device": HOPPER, "flags": ("_supports_flex_attn",), "layers": SINKS},
            "flex_attention",
            "has no attention s",
        ),
        ({"attention_dropout": 0.1, "layers": ({"attention_dropout": 0.0},) * 2}, "sdpa", None),
        ({"device": HOPPER, "layers": SINKS}, "cudnn", "has no attention sinks"),
        ({"device": HOPPER, "layers": MLA}, "cudnn", None),
        ({"device": HOPPER, "head_dim": 192}, "cudnn", None),
        ({"device": HOPPER, "head_dim": 8}, "flex_attention", "supports head_dim from 16, this model has 8"),
        ({"device": HOPPER, "head_dim": 512}, "flex_attention", "supports head_dim up to 256, this model has 512"),
        ({"device": HOPPER, "head_dim": 512}, "cudnn", "supports head_dim up to 256, this model has 512"),
        # One layer is wider than the others.
        ({"device": HOPPER, "layers": ({"head_dim": 256}, {"head_dim": 512})}, "cudnn", "this model has 512"),
    ],
)
def test_unsupported_configs_are_reported_when_bound(given, kernel, reason):
    wanted = request(**given)
    found = KERNEL_REGISTRY.get("attention", "causal", kernel).unsupported(wanted)
    if reason is None:
        assert found is None
        return
    assert reason in found
    with pytest.raises(ConfigError, match=f"attn_implementation='{kernel}'"):
        KERNEL_REGISTRY.resolve(wanted, kernel)


def test_flash_attention_4_does_not_support_models_that_ask_for_determinism():
    supports = KERNEL_REGISTRY.get("attention", "causal", "flash_attention_4").supports
    assert supports(request(HOPPER, head_dim=64)) is None
    assert "deterministic_flash_attn" in supports(request(HOPPER, head_dim=64, deterministic_flash_attn=True))


@pytest.mark.parametrize(("softcap", "fastest"), [(None, "flash_attention_4"), (50.0, "triton")])
def test_softcap_on_an_h200_selects_a_kernel_that_packs(softcap, fastest):
    given = request(HOPPER, head_dim=128, **({} if softcap is None else {"attn_logit_softcapping": softcap}))
    specs = (KERNEL_REGISTRY.get("attention", "causal", name) for name in ("flash_attention_4", "triton"))
    assert max(specs, key=lambda spec: spec.priority_for(given).value).name == fastest


@pytest.mark.parametrize(
    ("dtype", "reason"), [(torch.bfloat16, None), (torch.float32, "up to 256, this model has 512")]
)
def test_head_sizes_of_triton(dtype, reason):
    given = dataclasses.replace(request(HOPPER, head_dim=512), dtype=dtype)
    found = KERNEL_REGISTRY.get("attention", "causal", "triton").unsupported(given)
    assert found is None if reason is None else reason in found


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bias", "transposed bias", "heads of 512", "packed heads of 512"])
def test_sdpa_on_a_gpu_takes(form):
    width = 512 if "512" in form else 64
    q, k, v = (torch.randn(1, h, 24, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
    mask = (
        torch.randn(1, 24, 24, 4, device="cuda", dtype=torch.bfloat16).permute(0, 3, 1, 2) if "bias" in form else None
    )
    mask = mask.contiguous() if form == "bias" else mask
    cu_seqlens = torch.tensor([0, 9, 24], dtype=torch.int32, device="cuda")
    options = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens} if "packed" in form else {}
    options |= {"scaling": 0.1}
    found, _ = sdpa(Attention(), q, k, v, mask, **options)
    expected, _ = op.reference(
        Attention(), *(x.double() for x in (q, k, v)), None if mask is None else mask.double(), **options
    )
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.03)
    found.sum().backward()


WIDTHS = {
    (64, 64): True,
    (8, 8): True,
    (72, 72): True,
    (96, 64): True,
    (112, 112): True,
    (192, 128): True,
    (128, 192): True,
    (256, 256): True,
    (257, 256): False,
    (512, 512): False,
}


@pytest.mark.parametrize(("widths", "served"), WIDTHS.items())
def test_head_sizes_of_flash_attention_4(widths, served):
    wanted = request(HOPPER, layers=({"head_dim": widths[0], "v_head_dim": widths[1]},))
    assert (attention._head_dims_of_flash_4(wanted) is None) == served
    elsewhere = request(
        DeviceFacts("gpu", (10, 0), "a GPU"), layers=({"head_dim": widths[0], "v_head_dim": widths[1]},)
    )
    assert (attention._head_dims_of_flash_4(elsewhere) is None) == (max(widths) <= 128)


def test_model_with_dropout_uses_sdpa_on_a_gpu():
    assert (
        KERNEL_REGISTRY.get("attention", "causal", "sdpa").unsupported(request(HOPPER, attention_dropout=0.1)) is None
    )


def test_auto_on_an_unmeasured_gpu_is_sdpa():
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert KERNEL_REGISTRY.resolve(request(DeviceFacts("gpu", capability, "a GPU"))).chosen == "sdpa"


def test_auto_without_a_usable_kernel_is_eager():
    assert KERNEL_REGISTRY.resolve(request(CPU, layers=SINKS)).chosen == "eager"


def test_kernel_without_mask_support_raises():
    model = request().module
    model.config._attn_implementation = "sdpa"
    slot = SlotBinding("", "", "Model", Resolution("attention", "causal", "mine", "named", (), True))
    with pytest.raises(KernelError, match=r"attn_implementation='mine'.* no attribute mask_function(.|\n)*hint"):
        op.OP.attach(model, [slot], lambda *arguments, **options: None)
    assert model.config._attn_implementation == "sdpa"


# On a GPU; warnings of compilers and libraries are ignored there

KERNELS = ("sdpa", "cudnn", "flex_attention", "flash_attention_4")


def forward_backward(function, arguments, options, dtype):
    leaves = [x.detach().to(dtype).requires_grad_() for x in arguments]
    if "s_aux" in options:
        leaves.append(options["s_aux"].detach().to(dtype).requires_grad_())
        options = options | {"s_aux": leaves[-1]}
    out, _ = function(Attention(), *leaves[:3], None, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    return [out, *torch.autograd.grad(out, leaves, dout)]


def assert_as_good_as_eager(kernel, arguments, options):
    """The error of output and gradients, by norm, is at most twice that of eager bf16, plus eps."""
    found, eager, fp64 = (
        forward_backward(function, arguments, options, dtype)
        for function, dtype in (
            (kernel, torch.bfloat16),
            (op.reference, torch.bfloat16),
            (op.reference, torch.float64),
        )
    )
    for got, same, want in zip(found, eager, fp64, strict=True):
        error, eager_error = (got.double() - want).norm(), (same.double() - want).norm()
        assert error <= 2 * eager_error + 2**-8 * want.norm(), (error, eager_error, want.norm())


def usable(name):
    spec = KERNEL_REGISTRY.get("attention", "causal", name)
    reason = spec.unsupported(KernelRequest("attention", "causal", HOPPER)) if torch.cuda.is_available() else "no GPU"
    if reason:
        pytest.skip(reason)
    return load(name)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("option", ["softcap", "s_aux", "dropout"])
def test_options_on_a_gpu_are_correct_or_raise(name, option):
    kernel = usable(name)
    arguments = tensors(width=64, length=70, device="cuda", dtype=torch.bfloat16)
    options = {
        "softcap": {"softcap": 2.0},
        "s_aux": {"s_aux": torch.randn(4, device="cuda")},
        "dropout": {"dropout": 0.5},
    }[option]
    served = {
        "softcap": ("flex_attention", "flash_attention_4"),
        "s_aux": ("flash_attention_4",),
        "dropout": ("sdpa", "cudnn"),
    }
    if name not in served[option]:
        with pytest.raises(KernelError, match=f"{name}.* has no {option}"):
            kernel(Attention(), *arguments, None, scaling=0.125, **options)
    elif option == "dropout":
        # The mean over many dropout masks is the result without dropout.
        expected, _ = kernel(Attention(), *arguments, None, scaling=0.125)
        mean = (
            sum(kernel(Attention(), *arguments, None, scaling=0.125, **options)[0].double() for _ in range(400)) / 400
        )
        assert (mean - expected).norm() <= 0.1 * expected.norm()
    else:
        assert_as_good_as_eager(kernel, arguments, {"scaling": 0.125} | options)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["sdpa", "cudnn"])
@pytest.mark.parametrize(
    ("width", "dtype"), [(512, torch.bfloat16), (64, torch.float32), (64, torch.float64), (20, torch.bfloat16)]
)
def test_math_backend_never_runs_on_a_gpu(name, width, dtype):
    usable(name)
    q, k, v = tensors(width=width, length=70, device="cuda", dtype=dtype)
    found, message_seen = None, ""
    with torch.profiler.profile() as profile:
        try:
            found, _ = load(name)(Attention(), q, k, v, None)
        except KernelError as error:
            message_seen = str(error)
    assert found is not None or "no fused backend of torch supports query" in message_seen
    assert "aten::_scaled_dot_product_attention_math" not in [event.name for event in profile.events()]
    if found is not None:
        expected, _ = op.reference(Attention(), q.double(), k.double(), v.double(), None)
        assert (found.double() - expected).norm() <= 8 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("name", "widths"), [("cudnn_or_triton", (160, 192, 224, 256)), ("flash_attention_4_or_triton", (64, 256))]
)
@pytest.mark.parametrize("length", [300, 512, 1111, 2048])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 65}, {"is_causal": False}], ids=str)
def test_either_of_two_kernels_is_as_good_as_eager(name, widths, length, options):
    kernel = usable(name)
    for width, heads in itertools.product(widths, (2, 8)):
        arguments = tensors(8, heads, width=width, batch=2, length=length, device="cuda", dtype=torch.bfloat16)
        assert_as_good_as_eager(kernel, arguments, {"scaling": width**-0.5} | options)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["triton", "flash_attention_4"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("lengths", [(1400,), (900, 1, 340, 159)], ids=str)
def test_sinks_at_training_lengths(name, width, window, lengths):
    """Also sinks that take most of the softmax, and hardly any."""
    kernel = usable(name)
    arguments = tensors(heads=8, kv_heads=2, width=width, batch=1, length=1400, device="cuda", dtype=torch.bfloat16)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0, 9.0, -20.0, 4.0, 1.25], device="cuda")
    options = documents(*lengths, device="cuda") if len(lengths) > 1 else {}
    options |= {"sliding_window": window, "scaling": width**-0.5, "s_aux": sinks}
    assert_as_good_as_eager(kernel, arguments, options)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", KERNELS)
def test_documents_at_training_lengths(name):
    """GQA with head size 128 and documents longer than a tile, with and without a sliding window."""
    kernel = usable(name)
    arguments = tensors(heads=8, kv_heads=2, width=128, batch=1, length=700, device="cuda", dtype=torch.bfloat16)
    # Other kernels take seconds to compile for each window; `opslot verify` checks them.
    for window in (None, 100) if name in ("sdpa", "cudnn") else (None,):
        options = documents(300, 1, 260, 139, device="cuda") | {"sliding_window": window, "scaling": 128**-0.5}
        assert_as_good_as_eager(kernel, arguments, options)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("sinks", [False, True])
def test_flash_attention_4_compiles_with_fullgraph(sinks):
    kernel = usable("flash_attention_4")
    torch.manual_seed(0)
    leaves = [torch.randn(2, heads, 96, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
    options = {"s_aux": torch.randn(4, device="cuda", dtype=torch.bfloat16)} if sinks else {}
    plain = forward_backward(kernel, leaves, options, torch.bfloat16)
    compiled = forward_backward(torch.compile(kernel, fullgraph=True), leaves, options, torch.bfloat16)
    for got, want in zip(compiled, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-9)


def test_flex_block_mask_is_made_once_a_step(monkeypatch):
    from opslot.ops.attention import flex

    made = []
    create = flex.create_block_mask
    monkeypatch.setattr(flex, "create_block_mask", lambda *args, **kwargs: made.append(args) or create(*args, **kwargs))
    q, k = torch.zeros(1, 2, 10, 16), torch.zeros(1, 2, 10, 16)
    monkeypatch.setattr(flex, "_masks", TensorCache(8))
    cu_seqlens = torch.tensor([0, 4, 10], dtype=torch.int32)
    packed = {"cu_seq_lens_q": cu_seqlens}
    first = flex._shared_mask(q, k, True, packed)
    assert flex._shared_mask(q, k, True, packed) is first
    assert flex._shared_mask(q, k, True, {}) is flex._shared_mask(q, k, True, {})
    assert len(made) == 2
    assert flex._shared_mask(q, k, True, {**packed, "sliding_window": 3}) is not first
    # Changed in place, and another tensor with equal values.
    cu_seqlens[1] = 5
    changed = flex._shared_mask(q, k, True, packed)
    assert changed is not first
    assert flex._shared_mask(q, k, True, {"cu_seq_lens_q": cu_seqlens.clone()}) is not changed
    assert len(made) == 5


@pytest.mark.parametrize(
    "case",
    [case for name in ("causal", "bidirectional", "indexed") for case in CASES[name] if case.role == "check"],
    ids=lambda case: case.name,
)
def test_matmuls_of_the_roofline_are_over_visible_keys(case):
    arguments = case.make(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    sizes = (*query.shape[:3], key.shape[2])
    if "selected_bits" in arguments:
        mask = unpack_bits(arguments["selected_bits"], key.shape[2])
        mask = mask.repeat_interleave(sizes[1] // mask.shape[1], 1) if mask.dim() == 4 else mask[:, None]
    else:
        mask = visible(arguments["module"], query, key, arguments)
    pairs = math.prod(sizes) if mask is None else int(mask.expand(sizes).sum())
    cost = KERNEL_REGISTRY.op("attention").variant("causal").cost(arguments)
    assert cost.flops == 2 * pairs * (4 * query.shape[-1] + 3 * value.shape[-1])
