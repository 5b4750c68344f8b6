"""rotary_pos_emb: cases that the parity harness does not cover."""

import sys
import types

import pytest
import torch

from opslot import KERNEL_REGISTRY
from opslot._base.device import CPU, DeviceFacts
from opslot._base.errors import ConfigError, KernelError
from opslot.ops.rotary_pos_emb import op
from opslot.slots import KernelRequest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ONE_ANGLE_A_PAIR = ["half_cos_sin", "gptj", "gptj_fp32", "gptj_fp32_last"]
KERNELS = [(variant, "triton") for variant in ("full", "full_fp32", "partial", "gptj_to_neox", *ONE_ANGLE_A_PAIR)]
KERNELS += [(variant, "triton") for variant in ("partial_last", "gptj_to_neox_last")]
KERNELS += [(variant, "torch_fused") for variant in ("full", "full_fp32", "half_cos_sin", "partial")]


def load(variant, name):
    return KERNEL_REGISTRY.load("rotary_pos_emb", variant, name)


def repeats(variant):
    """Number of times each angle occurs in cos and sin."""
    return 1 if variant in ONE_ANGLE_A_PAIR else 2


def inputs(variant="full", dtype=torch.float32, batch=2, tokens=5, heads=4, kv_heads=2, width=16, device=DEVICE):
    generator = torch.Generator().manual_seed(0)
    rotary = width // 2 if "partial" in variant else width
    angles = torch.randn(1, tokens, rotary // 2, generator=generator).repeat(1, 1, repeats(variant))
    q, k = (
        torch.randn(batch, tokens, h, width, generator=generator).transpose(1, 2).to(device, dtype).requires_grad_()
        for h in (heads, kv_heads)
    )
    return q, k, angles.cos().to(device, dtype), angles.sin().to(device, dtype)


@pytest.mark.parametrize(
    ("module", "function", "variant"),
    [
        ("llama", "apply_rotary_pos_emb", "full"),
        ("qwen3_moe", "apply_rotary_pos_emb", "full"),
        ("qwen3_5", "apply_rotary_pos_emb", "partial"),
        ("glm4_moe", "apply_rotary_pos_emb", "partial"),
        ("deepseek_v3", "apply_rotary_pos_emb_interleave", "gptj_to_neox"),
        ("nemotron", "apply_rotary_pos_emb", "partial"),
        ("glmasr", "apply_rotary_pos_emb", "partial"),
        ("modernbert", "apply_rotary_pos_emb", "full_fp32"),
        ("hunyuan_vl", "apply_rotary_pos_emb", "full_fp32"),
        ("gpt_oss", "apply_rotary_pos_emb", "half_cos_sin"),
        ("openai_privacy_filter", "apply_rotary_pos_emb", "gptj"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_references_equal_transformers_bit_for_bit(module, function, variant, dtype):
    upstream = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    arguments = inputs(variant, dtype, device="cpu")
    expected = getattr(upstream, function)(*arguments)
    found = getattr(op, variant)(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("variant", "function"),
    [("partial_last", "apply_rotary_pos_emb"), ("gptj_to_neox_last", "apply_rotary_pos_emb_interleave")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_last_channels_equal_transformers_bit_for_bit(variant, function, dtype):
    """As latent attention does: only the last channels of queries are rotated, and keys are those channels alone."""
    upstream = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    q, k, cos, sin = inputs("partial", dtype, device="cpu")
    q_pass, q_rot = torch.split(q, [8, 8], dim=-1)
    q_rot, k_rot = getattr(upstream, function)(q_rot, k[..., :8], cos, sin)
    expected = torch.cat((q_pass, q_rot), dim=-1), k_rot
    assert all(map(torch.equal, getattr(op, variant)(q, k[..., :8], cos, sin), expected))


@pytest.mark.parametrize("module", ["deepseek_v2", "llama4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paired_equals_transformers_with_complex_angles(module, dtype):
    upstream = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    q, k, cos, sin = (x.detach() for x in inputs("gptj_fp32", dtype, device="cpu"))
    angles, dim = torch.complex(cos.float(), sin.float()), 1
    if module == "llama4":
        q, k, dim = q.transpose(1, 2), k.transpose(1, 2), 2
    found, expected = op.gptj_fp32(q, k, angles.real, angles.imag, dim), upstream.apply_rotary_emb(q, k, angles)
    # Multiplications of complex numbers may be fused with additions.
    torch.testing.assert_close(found, expected, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
    triton = load("gptj_fp32", "triton")(
        *(x.to(DEVICE) for x in (q, k)), *(x.to(DEVICE) for x in (angles.real, angles.imag)), dim
    )
    torch.testing.assert_close(triton, found, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


@pytest.mark.parametrize("variant", ["partial_last", "gptj_to_neox_last"])
def test_fewer_channels_than_cos_raise(variant):
    q, k, cos, sin = inputs()
    with pytest.raises(KernelError, match="cannot take cos: it has 16 channels for heads of 8"):
        load(variant, "triton")(q, k[..., :8], cos, sin)


@pytest.mark.parametrize("module", ["olmo", "olmo2", "flex_olmo"])
def test_full_cast_after_equals_transformers_with_fp32_cos_sin(module):
    upstream = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    q, k, cos, sin = inputs(dtype=torch.bfloat16, device="cpu")
    arguments = (q, k, cos.float(), sin.float())
    expected = upstream.apply_rotary_pos_emb(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(op.full_fp32(*arguments), expected, strict=True))


@pytest.mark.parametrize("module", ["gemma3n", "gemma4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_equals_transformers_bit_for_bit(module, dtype):
    upstream = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    q, _, cos, sin = inputs(dtype=dtype, device="cpu")
    for arguments in ((q, cos, sin), (q.transpose(1, 2), cos, sin, 2)):
        assert torch.equal(op.single(*arguments), upstream.apply_rotary_pos_emb(*arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("back", [False, True])
def test_last_channels_of_one_tensor_equal_transformers_bit_for_bit(back, dtype):
    upstream = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    q, _, cos, sin = (x.detach() for x in inputs("gptj_fp32_last", dtype, device="cpu"))
    cos, sin = cos[..., :3], -sin[..., :3] if back else sin[..., :3]
    for arguments in ((q, cos, sin), (q.transpose(1, 2), cos, sin, 2)):
        found = op.single_gptj_fp32_last(*arguments)
        assert torch.equal(found, upstream.apply_rotary_pos_emb(*arguments))
        triton = load("single_gptj_fp32_last", "triton")(*(x.to(DEVICE) for x in arguments[:3]), *arguments[3:])
        torch.testing.assert_close(triton.cpu(), found, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


@pytest.mark.parametrize(
    ("module", "variant", "repeated"),
    [
        ("glm", "gptj", False),
        ("helium", "gptj", False),
        ("moonshine", "gptj", False),
        ("glm4v", "gptj", True),
        ("blt", "gptj", True),
        ("cohere", "gptj_fp32", True),
        ("cohere2", "gptj_fp32", True),
        ("ernie4_5", "gptj_fp32", False),
        ("ernie4_5_vl_moe", "gptj_fp32", True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paired_equals_transformers_with_unrepeated_cos_sin(module, variant, repeated, dtype):
    """Transformers has each angle twice, in NeoX (half) or GPT-J (interleaved) layout."""
    upstream = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    q, k, *angles = inputs(variant, dtype, device="cpu")
    # All channels are rotated, or only the first half where Transformers supports it.
    for pairs in (8, 4) if module in ("glm", "moonshine", "glm4v") else (8,):
        once = [x[..., :pairs] for x in angles]
        twice = [x.repeat_interleave(2, dim=-1) if repeated else x.repeat(1, 1, 2) for x in once]
        expected = upstream.apply_rotary_pos_emb(q, k, *twice)
        assert all(torch.equal(a, b) for a, b in zip(getattr(op, variant)(q, k, *once), expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vision_reference_equals_transformers_bit_for_bit(dtype):
    upstream = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
    q, k, cos, sin = inputs(dtype=dtype, batch=1, device="cpu")
    arguments = (q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0].float(), sin[0].float())
    expected = upstream.apply_rotary_pos_emb_vision(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(op.vision(*arguments), expected, strict=True))


def test_multimodal_sections_use_their_axis():
    axes = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 1, 2, 8)
    merged = op.merge_sections(axes, [1, 2, 1])
    assert merged[0, 0].tolist() == [0, 1, 1, 2, 0, 1, 1, 2]


@pytest.mark.parametrize(("variant", "name"), KERNELS)
def test_scores_depend_on_relative_position_only(variant, name):
    """The score of q at position m and k at position n depends on m - n."""
    width, rotary = 16, 8 if "partial" in variant else 16
    frequencies = 1.0 / 100 ** (torch.arange(0, rotary, 2) / rotary)
    angles = (torch.arange(12)[:, None] * frequencies).repeat(1, repeats(variant))[None]
    q, k = (torch.randn(1, 1, 1, width).expand(1, 1, 12, width).to(DEVICE) for _ in range(2))
    q, k = load(variant, name)(q, k, angles.cos().to(DEVICE), angles.sin().to(DEVICE))
    scores = (q @ k.transpose(2, 3))[0, 0]
    for distance in range(-3, 4):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("variant", "name"), KERNELS)
def test_backward_is_the_inverse_rotation(variant, name):
    """A rotation is orthogonal, so backward of the output gives the input."""
    q, k, cos, sin = inputs(variant)
    outs = load(variant, name)(q, k, cos, sin)
    for x, grad in zip((q, k), torch.autograd.grad(outs, (q, k), [o.detach() for o in outs]), strict=True):
        torch.testing.assert_close(grad, x.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("variant", "name"), KERNELS)
def test_inputs_are_unchanged_and_strides_are_kept(variant, name):
    q, k, cos, sin = inputs(variant)
    before = q.detach().clone(), k.detach().clone()
    q_out, k_out = load(variant, name)(q, k, cos, sin)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    assert q_out.transpose(1, 2).is_contiguous()
    assert k_out.transpose(1, 2).is_contiguous()


@pytest.mark.quick("*-torch_fused", "full-triton", "partial-triton", "gptj-triton")
@pytest.mark.parametrize(("variant", "name"), KERNELS)
def test_only_required_gradients_are_computed(variant, name):
    kernel = load(variant, name)
    q, k, cos, sin = inputs(variant)
    dq, dk = torch.autograd.grad([o.square().sum() for o in kernel(q, k, cos, sin)], (q, k))
    # k frozen, then q frozen, then an unused output.
    (only_q,) = torch.autograd.grad([kernel(q, k.detach(), cos, sin)[0].square().sum()], q)
    (only_k,) = torch.autograd.grad([kernel(q.detach(), k, cos, sin)[1].square().sum()], k)
    (half_used,) = torch.autograd.grad(kernel(q, k, cos, sin)[0].square().sum(), q)
    assert torch.equal(only_q, dq)
    assert torch.equal(only_k, dk)
    assert torch.equal(half_used, dq)


@pytest.mark.quick("*-torch_fused", "full-triton", "gptj-triton")
@pytest.mark.parametrize(("variant", "name"), KERNELS)
def test_gradients_with_any_layout(variant, name):
    q, k, cos, sin = inputs(variant)
    for douts in (
        [torch.ones((), device=DEVICE).expand(x.shape) for x in (q, k)],
        [torch.randn(*x.shape[:-1], 2 * x.shape[-1], device=DEVICE)[..., ::2] for x in (q, k)],
        [torch.randn(x.shape, device=DEVICE) for x in (q, k)],
    ):
        found = torch.autograd.grad(load(variant, name)(q, k, cos, sin), (q, k), douts)
        expected = torch.autograd.grad(getattr(op, variant)(q, k, cos, sin), (q, k), douts)
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", ["gptj", "gptj_fp32"])
def test_triton_reads_strided_cos_sin_without_copying(variant, monkeypatch):
    kernel = load(variant, "triton")
    q, k, cos, sin = inputs(variant)
    expected = kernel(q, k, cos, sin)
    repeated = [x.repeat_interleave(2, dim=-1)[..., ::2] for x in (cos, sin)]
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda *_: pytest.fail("cos or sin is copied"))
    assert all(torch.equal(a, b) for a, b in zip(kernel(q, k, *repeated), expected, strict=True))


@pytest.mark.parametrize("variant", ["full_fp32", "gptj_fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_after_keeps_the_dtype_of_q_with_fp32_cos_sin(variant, dtype):
    for name in ["triton", "torch_fused"] if variant == "full_fp32" else ["triton"]:
        q, k, cos, sin = inputs(variant, dtype)
        outs = load(variant, name)(q, k, cos.float(), sin.float())
        grads = torch.autograd.grad([out.float().square().sum() for out in outs], (q, k))
        assert {x.dtype for x in (*outs, *grads)} == {dtype}


@pytest.mark.parametrize("name", ["triton", "torch_fused"])
def test_single_equals_one_output_of_full(name):
    kernel = load("single", name)
    q, k, cos, sin = inputs()
    both = load("full", name)(q, k, cos, sin)
    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
    for x, expected in zip((q, k), both, strict=True):
        dout = torch.randn_like(expected)
        (wanted,) = torch.autograd.grad(expected, x, dout, retain_graph=True)
        for call in (kernel, compiled):
            found = call(x, cos, sin)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(torch.autograd.grad(found, x, dout)[0], wanted)


@pytest.mark.parametrize("name", ["triton", "torch_fused"])
def test_single_names_its_tensor_in_errors(name):
    x, _, cos, sin = (t.detach() for t in inputs())
    with pytest.raises(KernelError, match="cannot take cos: it has 8 channels for heads of 16"):
        load("single", name)(x, cos[..., :8], sin[..., :8])
    with pytest.raises(KernelError, match="cannot take cos: it requires a gradient"):
        load("single", name)(x, cos.clone().requires_grad_(), sin)
    if name == "triton":
        with pytest.raises(KernelError, match=r"cannot take x: its dtype is torch\.float64"):
            load("single", name)(x.double(), cos, sin)


@pytest.mark.parametrize(
    ("variant", "name"), [("half_cos_sin", "triton"), ("half_cos_sin", "torch_fused"), ("gptj", "triton")]
)
def test_cos_sin_with_another_size_raise(variant, name):
    q, k, cos, sin = (x.detach() for x in inputs("full"))
    with pytest.raises(KernelError, match="cannot take cos: it has 16 channels for heads of 16"):
        load(variant, name)(q, k, cos, sin)


def test_triton_splits_many_heads():
    q, k, cos, sin = inputs(batch=1, tokens=2, heads=300, kv_heads=5, width=32)
    found = load("full", "triton")(q, k, cos, sin)
    for got, want in zip(found, op.full(q, k, cos, sin), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_triton_halves_with_different_angles():
    q, k, cos, sin = inputs()
    cos, sin = torch.randn_like(cos), torch.randn_like(sin)
    found = torch.autograd.grad([o.square().sum() for o in load("full", "triton")(q, k, cos, sin)], (q, k))
    expected = torch.autograd.grad([o.square().sum() for o in op.full(q, k, cos, sin)], (q, k))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.quick("full-*", "partial-triton", "gptj-triton")
@pytest.mark.parametrize(("variant", "name"), KERNELS)
def test_compiles_with_fullgraph(variant, name):
    kernel = load(variant, name)
    q, k, cos, sin = inputs(variant)
    # All variants have one code object, and dynamo limits how often it compiles one.
    torch.compiler.reset()
    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad([o.square().sum() for o in kernel(q, k, cos, sin)], (q, k))
    found = torch.autograd.grad([o.square().sum() for o in compiled(q, k, cos, sin)], (q, k))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, k, cos, sin), kernel(q, k, cos, sin))


def test_opcheck():
    load("full", "triton")
    q, k, cos, sin = (x.detach() for x in inputs())
    arguments = (cos, sin, torch.float32, 16, False, False, False, False)
    torch.library.opcheck(torch.ops.opslot.rotary_pos_emb.default, (q, k, *arguments))
    torch.library.opcheck(torch.ops.opslot.rotary_pos_emb.default, (q, None, *arguments))
    pairs = (cos[..., ::2], sin[..., ::2], torch.float32, 16, True, True, False, True)
    torch.library.opcheck(torch.ops.opslot.rotary_pos_emb.default, (q, k, *pairs))
    last = (cos[..., :8], sin[..., :8], torch.float32, 8, True, False, True, False)
    torch.library.opcheck(torch.ops.opslot.rotary_pos_emb.default, (q, k[..., :8], *last))


def _bad(name):
    q, k, cos, sin = (x.detach() for x in inputs())
    return {
        "float64": (q.double(), k, cos, sin),
        "k of another length": (q, k[:, :, 1:], cos, sin),
        "another batch": (q, k, cos.expand(3, -1, -1), sin.expand(3, -1, -1)),
        "cos with a gradient": (q, k, cos.clone().requires_grad_(), sin),
        "fewer channels": (q, k, cos[..., :8], sin[..., :8]),
        "wider keys": (q, torch.cat([k, k], -1), cos, sin),
        "odd channels": (q, k, cos[..., :7], sin[..., :7]),
        "more channels": (q, k, cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)),
        "unsqueeze_dim": (q, k, cos, sin, 0),
    }[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("float64", "cannot take q: its dtype is torch.float64"),
        ("k of another length", "cannot take k: its shape is"),
        ("another batch", "cannot take cos: its shape is"),
        ("cos with a gradient", "cannot take cos: it requires a gradient"),
        ("fewer channels", "use eager, or the partial variant"),
        ("unsqueeze_dim", "cannot take unsqueeze_dim: it is 0"),
    ],
)
def test_triton_unsupported_inputs_raise(name, message):
    with pytest.raises(KernelError, match=message) as caught:
        load("full", "triton")(*_bad(name))
    assert "rotary_pos_emb_implementation='triton'" in str(caught.value)


@pytest.mark.parametrize("variant", ["full", "partial_last"])
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_triton_rotates_keys_of_another_dtype(variant, unsqueeze_dim):
    """Under autocast a layer norm of the keys alone returns float32."""
    q, k, cos, sin = inputs()
    q, k = (x.detach().transpose(1, unsqueeze_dim).requires_grad_() for x in (q.to(torch.bfloat16), k))
    found, wanted = (
        rotate(q, k, cos, sin, unsqueeze_dim) for rotate in (load(variant, "triton"), op.OP.variants[variant].reference)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    gradients = (torch.autograd.grad(sum(x.sum() for x in out), (q, k)) for out in (found, wanted))
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("variant", "name", "message"),
    [
        ("full", "cos with a gradient", "cannot take cos: it requires a gradient"),
        ("full", "fewer channels", "cannot take cos: it has 8 channels for heads of 16"),
        ("full", "wider keys", "cannot take cos: it has 16 channels for heads of 16 and 32"),
        ("partial", "odd channels", "cannot take cos: it has 7 channels for heads of 16"),
        ("partial", "more channels", "cannot take cos: it has 32 channels for heads of 16"),
    ],
)
def test_torch_fused_unsupported_inputs_raise(variant, name, message):
    with pytest.raises(KernelError, match=message):
        load(variant, "torch_fused")(*_bad(name))


@pytest.mark.parametrize("variant", sorted(op.OP.variants.keys() - {"full"}))
def test_liger_is_unsupported_for_variants_it_miscomputes(variant):
    request = KernelRequest("rotary_pos_emb", variant, DeviceFacts("gpu", (9, 0)), torch.bfloat16)
    with pytest.raises(ConfigError, match="'liger_kernel' serves only the variant full"):
        KERNEL_REGISTRY.resolve(request, "liger_kernel")


def test_npu_without_npu_raises_with_alternatives():
    with pytest.raises(ConfigError, match="requires an NPU, this is CPU") as caught:
        KERNEL_REGISTRY.resolve(KernelRequest("rotary_pos_emb", "full", CPU, torch.float32), "npu")
    assert "torch_fused" in str(caught.value).partition("usable here:")[2]


def test_npu_passes_broadcast_cos_sin(monkeypatch):
    def npu_rotary_mul(x, cos, sin):
        assert cos.ndim == sin.ndim == 4
        return op._rotate(x, cos, sin)

    monkeypatch.setitem(sys.modules, "torch_npu", types.SimpleNamespace(npu_rotary_mul=npu_rotary_mul))
    monkeypatch.delitem(sys.modules, "opslot.ops.rotary_pos_emb.npu", raising=False)
    from opslot.ops.rotary_pos_emb import npu

    monkeypatch.delitem(sys.modules, "opslot.ops.rotary_pos_emb.npu")
    arguments = inputs(device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(npu.full(*arguments), op.full(*arguments), strict=True))
