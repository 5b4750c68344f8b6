"""expand_kv: cases that the parity harness does not cover, and models that use it."""

import copy
import types

import pytest
import torch

from opslot import KERNEL_REGISTRY
from opslot._base.errors import KernelError
from opslot.models.discovery import discover
from opslot.ops.expand_kv import op
from opslot.ops.expand_kv.forms import FORMS
from opslot.patchgen import PatchConfig
from opslot.patchgen.engine import generate
from opslot.patchgen.forms import ModuleView
from opslot.patchgen.source import Release
from opslot.patchgen.upstream import UpstreamModule

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

import opslot
from opslot.verify.tiny import tiny_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = {"preset": "eager", "expand_kv_implementation": "triton", "rotary_pos_emb_implementation": "triton"}


def kernel():
    return KERNEL_REGISTRY.load("expand_kv", "standard", "triton")


def inputs(batch=2, tokens=5, heads=3, nope=12, rope=4, v=8):
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(batch, tokens, heads * (nope + v), generator=generator).to(DEVICE).requires_grad_()
    k_rot = torch.randn(batch, 1, tokens, rope, generator=generator).to(DEVICE).requires_grad_()
    return kv, k_rot, (heads, nope)


def expand(function, kv, k_rot, sizes):
    heads, nope = sizes
    return function(kv.unflatten(-1, (heads, -1)).transpose(1, 2), k_rot, nope)


def test_values_are_a_view_and_the_gradient_of_kv_is_one_tensor():
    kv, k_rot, sizes = inputs()
    found, expected = (expand(function, kv, k_rot, sizes) for function in (kernel(), op.standard))
    assert all(map(torch.equal, found, expected))
    assert found[1].untyped_storage().data_ptr() == kv.untyped_storage().data_ptr()
    assert found[0].transpose(1, 2).is_contiguous()
    # Of other strides, as those of attention are.
    douts = [torch.randn(*x.shape[:-1], 2 * x.shape[-1], device=DEVICE)[..., : x.shape[-1]] for x in found]
    gradients = [torch.autograd.grad(outs, (kv, k_rot), douts) for outs in (found, expected)]
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert gradients[0][0].is_contiguous()
    torch.testing.assert_close(gradients[0][1], gradients[1][1])


@pytest.mark.parametrize(("used", "unused"), [(0, 1), (1, 0)])
def test_unused_output_has_a_gradient_of_zero(used, unused):
    kv, k_rot, sizes = inputs()
    gradients = [
        torch.autograd.grad(
            expand(function, kv, k_rot, sizes)[used].square().sum(),
            (kv, k_rot),
            allow_unused=True,
            materialize_grads=True,
        )
        for function in (kernel(), op.standard)
    ]
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted)


def test_gradients_do_not_depend_on_other_tokens():
    kv, k_rot, sizes = inputs(heads=40)
    whole, part = (
        torch.autograd.grad([x.square().sum() for x in expand(kernel(), *each, sizes)], each)
        for each in ((kv, k_rot), (kv[1:, 2:], k_rot[1:, :, 2:]))
    )
    assert torch.equal(whole[0][1:, 2:], part[0])
    assert torch.equal(whole[1][1:, :, 2:], part[1])


def test_compiles_with_fullgraph():
    kv, k_rot, sizes = inputs()
    function = kernel()

    def loss(kv, k_rot):
        key, value = expand(function, kv, k_rot, sizes)
        return key.square().sum() + value.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found, wanted = (torch.autograd.grad(f(kv, k_rot), (kv, k_rot)) for f in (compiled, loss))
    torch.testing.assert_close(found, wanted)


def test_opcheck():
    kernel()
    kv, k_rot, (heads, nope) = inputs()
    kv = kv.detach().unflatten(-1, (heads, -1)).transpose(1, 2)
    torch.library.opcheck(torch.ops.opslot.expand_kv.default, (kv, k_rot.detach(), nope))
    dkey, dvalue = torch.randn_like(kv[..., :16]), torch.randn_like(kv[..., nope:])
    dtypes = (torch.float32, torch.bfloat16)
    torch.library.opcheck(torch.ops.opslot.expand_kv_backward.default, (dkey, dvalue, nope, *dtypes))


@pytest.mark.parametrize("heads", [1, 3, 16, 40, 128])
@pytest.mark.parametrize("widths", [(128, 64, 128), (192, 64, 256), (64, 32, 64), (24, 8, 40), (3, 1, 5)])
def test_tiles_and_warps_are_powers_of_two(heads, widths):
    """Triton compiles nothing else; its interpreter accepts any number of warps."""
    from opslot.ops.expand_kv import triton as expand_kv
    from opslot.ops.rotary_pos_emb.kernels import rotate as rotary

    nope, rope, _ = widths
    tiling = rotary._plan(heads, 1, 2 * rope, nope)
    numbers = [tiling.q_tile, tiling.k_tile, tiling.half_tile, tiling.warps]
    for sizes in (widths, widths[:2]):
        tiles, per_tile, warps = expand_kv._plan(heads, *sizes)
        numbers += [*tiles, per_tile, warps]
    assert all(number > 0 and number & (number - 1) == 0 for number in numbers), numbers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kv, k_rot, nope: (kv.double(), k_rot, nope), "cannot take kv: its dtype is torch.float64"),
        (lambda kv, k_rot, nope: (kv, k_rot.double(), nope), "cannot take k_rot: its dtype is torch.float64"),
        (lambda kv, k_rot, nope: (kv, k_rot, kv.shape[-1]), "cannot take kv: its shape is"),
        (lambda kv, k_rot, nope: (kv[0], k_rot, nope), "cannot take kv: its shape is"),
        (lambda kv, k_rot, nope: (kv, k_rot.expand(-1, 3, -1, -1), nope), "cannot take k_rot: its shape is"),
        (lambda kv, k_rot, nope: (kv, k_rot[:, :, 1:], nope), "cannot take k_rot: its shape is"),
    ],
)
def test_unsupported_inputs_raise(change, message):
    kv, k_rot, (heads, nope) = inputs()
    arguments = change(kv.detach().unflatten(-1, (heads, -1)).transpose(1, 2), k_rot.detach(), nope)
    with pytest.raises(KernelError, match=message):
        kernel()(*arguments)


@pytest.mark.parametrize(
    ("arch", "rotary"),
    [
        ("deepseek_v2", {"gptj_fp32_last"}),
        ("deepseek_v3", {"partial_last", "gptj_to_neox_last"}),
        ("minicpm3", {"partial_last"}),
        ("kimi_linear", set()),
        ("glm_moe_dsa", {"gptj_to_neox_last"}),
        ("longcat_flash", set()),
    ],
)
def test_latent_attention_is_found(arch, rotary):
    found = [(match.op, match.variant) for match in discover(arch).matches]
    assert found.count(("expand_kv", "standard")) == 1
    assert {variant for _, variant in found if variant.endswith("_last")} == rotary


# As before 5.16.
FORWARD = """
import torch


class Attention:
    def forward(self, kv, k_rot, cache=None):
        k_pass, value_states = torch.split(kv, [self.nope, self.width], dim=-1)
        k_rot = k_rot.expand(*k_pass.shape[:-1], -1)
        key_states = torch.cat((k_pass, k_rot), dim=-1)
        if cache is not None:
            key_states, value_states = cache(key_states, value_states)
        return key_states, value_states
"""


def matched(text):
    """The generated text, or None without a match."""
    module = UpstreamModule("transformers.toy", "5.9.0", text)
    patch = PatchConfig(module.name)
    matches = [match for form in FORMS for match in form(ModuleView(module))]
    for match in matches:
        match.write(patch)
    return generate(patch, Release("5.9.0", None, {module.name: module})) if matches else None


def test_forward_with_a_bound_kernel_equals_the_original():
    text = matched(FORWARD)
    assert text is not None
    results = []
    for source, bound in ((FORWARD, None), (text, None), (text, op.standard)):
        module = types.ModuleType("toy")
        exec(source, vars(module))
        attention = module.Attention()
        attention.nope, attention.width, attention._opslot_expand_kv = 12, 8, bound
        kv, k_rot, (heads, _) = inputs()
        kv = kv.unflatten(-1, (heads, -1)).transpose(1, 2)
        results.append([*attention.forward(kv, k_rot), *attention.forward(kv, k_rot, lambda k, v: (2 * k, v))])
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0]))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("key_states = torch.cat", "k_pass = k_pass * 2\n        key_states = torch.cat"),
        ("key_states = torch.cat", "k_rot = k_rot * 2\n        key_states = torch.cat"),
        ("key_states = torch.cat", "value_states = value_states * 2\n        key_states = torch.cat"),
        ("torch.cat((k_pass, k_rot)", "torch.cat((k_rot, k_pass)"),
        ("return key_states", "k_pass.add_(1)\n        return key_states"),
    ],
)
def test_other_uses_of_the_parts_are_not_matched(old, new):
    assert old in FORWARD
    assert matched(FORWARD.replace(old, new)) is None


def step(model, **inputs):
    model.zero_grad()
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.quick("deepseek_v3", "kimi_linear")
@pytest.mark.parametrize("arch", ["deepseek_v3", "minicpm3", "kimi_linear", "deepseek_v2", "hy_v4"])
def test_model_trains_and_generates_like_the_original(arch):
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_config(tiny_config(arch)).to(DEVICE)
    original.set_attn_implementation("eager")
    model = copy.deepcopy(original)
    opslot.apply(model, TRITON)
    assert opslot.explain(model).chosen("expand_kv") == ("triton",)
    ids = torch.randint(3, 48, (2, 9), device=DEVICE)
    (loss, found), (expected, wanted) = (step(each, input_ids=ids) for each in (model, original))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(
            gradient, wanted[name], rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )
    for each in (model, original):
        each.eval()
    tokens = [each.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0) for each in (model, original)]
    assert torch.equal(*tokens)


def test_interleaved_or_not_is_read_from_the_config():
    torch.manual_seed(0)
    config = tiny_config("deepseek_v3")
    config.num_hidden_layers = 1
    original = AutoModelForCausalLM.from_config(config).to(DEVICE)
    original.set_attn_implementation("eager")
    model = copy.deepcopy(original)
    opslot.apply(model, TRITON)
    ids = torch.randint(3, 48, (1, 7), device=DEVICE)
    losses = []
    for interleaved in (True, False):
        for each in (model, original):
            each.config.rope_interleave = interleaved
        losses.append(original(ids, labels=ids).loss)
        torch.testing.assert_close(model(ids, labels=ids).loss, losses[-1], rtol=1e-5, atol=1e-6)
    assert losses[0] != losses[1]


def test_packed_documents_equal_documents_alone():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("deepseek_v3")).to(DEVICE).eval()
    opslot.apply(model, {**TRITON, "attn_implementation": "sdpa"})
    documents = [torch.randint(3, 48, (1, length), device=DEVICE) for length in (5, 3)]
    positions = torch.cat([torch.arange(d.shape[1], device=DEVICE) for d in documents])[None]
    with torch.no_grad():
        packed = model(torch.cat(documents, 1), position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(document, use_cache=False).logits for document in documents], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_no_copies_at_the_width_of_moonlight_on_a_gpu():
    """Concatenated are differences of positions (by Transformers' masks), rotary frequencies, and in backward the
    compressed keys and values."""
    if DEVICE != "cuda":
        pytest.skip("requires a GPU")
    torch.manual_seed(0)
    config = tiny_config("deepseek_v3")
    sizes = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 1}
    latent = {
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    for name, value in {**sizes, **latent, "qk_head_dim": 192, "head_dim": 64, "first_k_dense_replace": 1}.items():
        setattr(config, name, value)
    original = AutoModelForCausalLM.from_config(config).to(DEVICE, torch.bfloat16)
    model = copy.deepcopy(original)
    opslot.apply(model, "auto")
    opslot.apply(original, {"expand_kv_implementation": "eager", "rotary_pos_emb_implementation": "eager"})
    assert opslot.explain(model).chosen("expand_kv") == ("triton",)
    ids = torch.randint(3, 48, (2, 2048), device=DEVICE)
    (loss, found), (expected, wanted) = (step(each, input_ids=ids, use_cache=False) for each in (model, original))
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
    for name, gradient in found.items():
        assert (gradient - wanted[name]).float().norm() <= 0.02 * wanted[name].float().norm() + 1e-6, name
    counts = []
    for each in (model, original):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step(each, input_ids=ids, use_cache=False)
            torch.cuda.synchronize()
        counts.append(sum(event.count for event in profile.key_averages() if "CatArrayBatchedCopy" in event.key))
    assert counts[0] <= 3 < counts[1]
