"""rotary_pos_emb with RMSNorm of the heads: cases that the parity harness does not cover."""

import importlib
import itertools

import pytest
import torch

from opslot import KERNEL_REGISTRY
from opslot._base.errors import KernelError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VARIANTS = ["norm_full", "norm_full_fp32", "norm_partial", "full_norm", "full_fp32_norm"]
EPS = 1e-6


def load(variant):
    return KERNEL_REGISTRY.load("rotary_pos_emb", variant, "triton")


def reference(variant):
    return KERNEL_REGISTRY.op("rotary_pos_emb").variant(variant).reference


def inputs(variant="norm_full", dtype=torch.float32, device=DEVICE, batch=2, tokens=5, heads=4, kv_heads=2, width=16):
    """q, k, cos, sin and both weights."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    angles = randn(1, tokens, (width // 2 if "partial" in variant else width) // 2).repeat(1, 1, 2)
    q, k = (randn(batch, tokens, h, width).transpose(1, 2) for h in (heads, kv_heads))
    weights = [1 + 0.2 * randn(width) for _ in range(2)]
    q, k, *weights = (x.to(device, dtype).requires_grad_() for x in (q, k, *weights))
    return q, k, angles.cos().to(device, dtype), angles.sin().to(device, dtype), *weights, EPS, EPS


def differentiable(arguments):
    return [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]


def grads(outs, leaves):
    return torch.autograd.grad([out.float().square().sum() for out in outs], leaves)


@pytest.mark.parametrize(
    ("module", "norm", "variant", "options"),
    [
        ("qwen3", "Qwen3RMSNorm", "norm_full", {}),
        ("gemma3", "Gemma3RMSNorm", "norm_full", {"weight_offset": True}),
        ("qwen3_5", "Qwen3_5RMSNorm", "norm_partial", {"weight_offset": True}),
        ("glm4_moe", "Glm4MoeRMSNorm", "norm_partial", {}),
        ("afmoe", "AfmoeRMSNorm", "norm_full", {"cast_after_weight": True}),
        ("hunyuan_v1_dense", "HunYuanDenseV1RMSNorm", "full_norm", {}),
        ("hunyuan_vl", "HunYuanVLRMSNorm", "full_fp32_norm", {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_references_equal_transformers_bit_for_bit(module, norm, variant, options, dtype):
    upstream = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    q, k, cos, sin, *weights, _, _ = inputs(variant, dtype, "cpu")
    norms = [getattr(upstream, norm)(16, eps=EPS).to(dtype) for _ in weights]
    for each, weight in zip(norms, weights, strict=True):
        each.load_state_dict({"weight": weight})
    found = reference(variant)(q, k, cos, sin, *weights, EPS, EPS, **options)
    if variant.endswith("norm"):
        q, k = upstream.apply_rotary_pos_emb(q, k, cos, sin)
        expected = norms[0](q), norms[1](k)
    else:
        expected = upstream.apply_rotary_pos_emb(norms[0](q), norms[1](k), cos, sin)
    assert all(map(torch.equal, found, expected))


@pytest.mark.quick("norm_full", "full_norm")
@pytest.mark.parametrize("variant", VARIANTS)
def test_only_required_gradients_are_computed(variant):
    arguments = inputs(variant)
    expected = dict(enumerate(grads(load(variant)(*arguments), differentiable(arguments))))
    places = [0, 1, 4, 5]
    for count in (1, 2):
        for chosen in itertools.combinations(range(4), count):
            given = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
            for i in chosen:
                given[places[i]].requires_grad_()
            found = grads(load(variant)(*given), [given[places[i]] for i in chosen])
            assert all(torch.equal(x, expected[i]) for i, x in zip(chosen, found, strict=True))


def test_gradients_of_one_output():
    arguments = inputs()
    leaves = differentiable(arguments)
    for i in range(2):
        found, expected = (
            torch.autograd.grad(f(*arguments)[i].square().sum(), leaves, allow_unused=True, materialize_grads=True)
            for f in (load("norm_full"), reference("norm_full"))
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_inputs_are_unchanged_and_strides_are_kept():
    arguments = inputs()
    before = [x.detach().clone() for x in differentiable(arguments)]
    outs = load("norm_full")(*arguments)
    found = grads(outs, differentiable(arguments))
    assert all(map(torch.equal, differentiable(arguments), before))
    assert all(x.transpose(1, 2).is_contiguous() for x in (*outs, *found[:2]))


@pytest.mark.parametrize("variant", ["norm_full", "norm_partial", "full_norm"])
def test_any_layout(variant):
    arguments = inputs(variant)
    leaves = differentiable(arguments)
    # One column slice, one with strided channels, weights with strides.
    wide = torch.cat([arguments[0], arguments[0]], -1)
    q = wide[..., : arguments[0].shape[-1]]
    k = arguments[1].repeat_interleave(2, dim=-1)[..., ::2]
    weights = [weight.repeat_interleave(2)[::2] for weight in arguments[4:6]]
    for douts in (
        [torch.ones((), device=DEVICE).expand(x.shape) for x in (q, k)],
        [torch.randn(*x.shape[:-1], 2 * x.shape[-1], device=DEVICE)[..., ::2] for x in (q, k)],
    ):
        found, expected = (
            torch.autograd.grad(f(q, k, *arguments[2:4], *weights, EPS, EPS), leaves, douts, retain_graph=True)
            for f in (load(variant), reference(variant))
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_tokens_before_heads():
    q, k, *rest = inputs()
    found = load("norm_full")(q.transpose(1, 2), k.transpose(1, 2), *rest, unsqueeze_dim=2)
    expected = load("norm_full")(q, k, *rest)
    assert all(torch.equal(a.transpose(1, 2), b) for a, b in zip(found, expected, strict=True))


def test_results_repeat_bit_for_bit():
    arguments = inputs(batch=3, tokens=12)
    first, second = (
        (*outs, *grads(outs, differentiable(arguments)))
        for outs in (load("norm_full")(*arguments), load("norm_full")(*arguments))
    )
    assert all(map(torch.equal, first, second))


@pytest.mark.quick("False-*", "True-norm_full", "True-full_norm")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cast", [False, True])
def test_dtypes_are_those_of_the_reference(variant, cast):
    """Of bfloat16 heads with weights, or angles, or both in float32."""
    for fp32_weights, fp32_angles in itertools.product([False, True], repeat=2):
        q, k, cos, sin, *weights, _, _ = inputs(variant, torch.bfloat16)
        if fp32_weights:
            weights = [weight.detach().float().requires_grad_() for weight in weights]
        if fp32_angles:
            cos, sin = cos.float(), sin.float()
        found, expected = (
            f(q, k, cos, sin, *weights, EPS, EPS, cast_after_weight=cast) for f in (load(variant), reference(variant))
        )
        assert [x.dtype for x in found] == [x.dtype for x in expected]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)
        assert [x.dtype for x in grads(found, [q, k, *weights])] == [x.dtype for x in (q, k, *weights)]


def test_weights_of_two_dtypes():
    q, k, cos, sin, q_weight, k_weight, *_ = inputs(dtype=torch.bfloat16)
    arguments = (q, k, cos, sin, q_weight.float(), k_weight, EPS, EPS)
    found, expected = load("norm_full")(*arguments), reference("norm_full")(*arguments)
    assert [x.dtype for x in found] == [x.dtype for x in expected] == [torch.float32, torch.bfloat16]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)


def test_zero_eps_and_zero_rows_of_padding():
    """Tiles have more rows than heads; their rows past the end are zeros."""
    q, k, cos, sin, *weights, _, _ = inputs(heads=3, kv_heads=3)
    outs = load("norm_full")(q, k, cos, sin, *weights, 0.0, 0.0)
    assert all(x.isfinite().all() for x in (*outs, *grads(outs, [q, k, *weights])))


@pytest.mark.quick("norm_full")
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_with_fullgraph(variant):
    kernel, arguments = load(variant), inputs(variant)
    torch.compiler.reset()
    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
    found, expected = (
        (*outs, *grads(outs, differentiable(arguments))) for outs in (compiled(*arguments), kernel(*arguments))
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_opcheck():
    load("norm_full")
    q, k, cos, sin, *weights, _, _ = (x.detach() if isinstance(x, torch.Tensor) else x for x in inputs())
    tensors, options = (q, k, *weights, cos, sin), (EPS, EPS, False, False, False, False)
    torch.library.opcheck(torch.ops.opslot.norm_rotary_pos_emb.default, (*tensors, *options))
    backward = torch.ops.opslot.norm_rotary_pos_emb_backward.default
    torch.library.opcheck(backward, (q, k, *tensors, *options, True, True, True, True))
    torch.library.opcheck(backward, (q, None, *tensors, *options, False, False, False, True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: (a[0].double(), *a[1:]), "cannot take q: its dtype is torch.float64"),
        (lambda a: (*a[:4], a[4].double(), *a[5:]), "cannot take q_weight: its dtype is torch.float64"),
        (lambda a: (*a[:5], a[5][:8], *a[6:]), r"cannot take k_weight: its shape is \(8,\), not \(16,\)"),
        (lambda a: (*a[:4], a[4][:8], *a[5:]), r"cannot take q_weight: its shape is \(8,\), not \(16,\)"),
        (
            lambda a: (*a[:2], a[2][..., :8], a[3][..., :8], *a[4:]),
            "cannot take cos: it has 8 channels",
        ),
        (lambda a: (*a, False, False, 0), "cannot take unsqueeze_dim: it is 0"),
    ],
)
def test_unsupported_inputs_raise(change, message):
    with pytest.raises(KernelError, match=message) as caught:
        load("norm_full")(*change(inputs()))
    assert "rotary_pos_emb_implementation='triton'" in str(caught.value)
