"""chunk_gated_delta_rule: the chunked reference equals the token-by-token recurrence, and documents are independent."""

import itertools
import sys
import types

import pytest
import torch

import opslot.ops.chunk_gated_delta_rule as room
from opslot import KERNEL_REGISTRY
from opslot._base.device import DeviceFacts, facts_of
from opslot._base.errors import ConfigError, KernelError
from opslot.ops.chunk_gated_delta_rule import op
from opslot.slots import InputCase, KernelRequest
from opslot.verify.parity import check_kernel
from tests.gradients import gradients, leaves_of, to_float64


def inputs(
    length,
    batch=1,
    k_heads=2,
    heads=4,
    width=16,
    v_width=24,
    dtype=torch.float64,
    device="cpu",
    channels=(),
    generator=None,
):
    """`channels`: further dims of the decay, (width,) in the variant per_channel."""
    generator = generator or torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    made = {
        "query": draw(batch, length, k_heads, width),
        "key": draw(batch, length, k_heads, width),
        "value": draw(batch, length, heads, v_width),
        "g": torch.nn.functional.logsigmoid(draw(batch, length, heads, *channels) + 2),
        "beta": draw(batch, length, heads).sigmoid(),
    }
    return {n: t.requires_grad_() for n, t in made.items()}


def token_by_token(query, key, value, g, beta, initial_state=None, l2norm=True):
    """The recurrence of the paper."""
    q, k = query, key
    if l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    groups = value.shape[2] // key.shape[2]
    q, k = (x.repeat_interleave(groups, 2) for x in (q / key.shape[-1] ** 0.5, k))
    state = initial_state
    if state is None:
        state = value.new_zeros(value.shape[0], value.shape[2], key.shape[3], value.shape[3])
    outputs = []
    for t in range(query.shape[1]):
        state = state * g[:, t].reshape(*g.shape[0:3:2], -1, 1).exp()
        predicted = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        correction = beta[:, t, :, None] * (value[:, t] - predicted)
        state = state + k[:, t, :, :, None] * correction[:, :, None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1), state


def assert_same(found, expected, atol=1e-12):
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=atol)


@pytest.mark.parametrize("length", [1, 63, 64, 130])
@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize("channels", [(), (16,)])
def test_chunked_equals_token_by_token_recurrence(length, l2norm, channels):
    given = inputs(length, batch=2, channels=channels)
    if not l2norm:
        # Without L2 normalization the state diverges for keys longer than sqrt(2 / beta).
        given["key"] = (given["key"].detach() * 0.1).requires_grad_()
    state = torch.randn(2, 4, 16, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    found = op.reference(**given, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=l2norm)
    expected = token_by_token(**given, initial_state=state, l2norm=l2norm)
    assert_same(found, expected)
    leaves = [*given.values(), state]
    assert_same(gradients(found, leaves), gradients(expected, leaves), atol=1e-11)


@pytest.mark.parametrize("decay", [20.0, 1000.0])
def test_strong_decays_of_channels_do_not_overflow(decay):
    """exp(-G) of a chunk is beyond float64 for these, while no decay between two tokens is above 1."""
    given = inputs(100, channels=(16,), dtype=torch.float32)
    given["g"] = (given["g"].detach() * decay).requires_grad_()
    found, _ = op.reference(**given, use_qk_l2norm_in_kernel=True)
    exact = to_float64(given)
    expected, _ = token_by_token(**exact)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    grads = zip(gradients((found,), leaves_of(given)), gradients((expected,), leaves_of(exact)), strict=True)
    for got, want in grads:
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("channels", [(), (16,)])
def test_packed_documents_equal_separate_documents(index, channels):
    documents = [3, 65, 0, 1, 128, 20]
    given = inputs(sum(documents), channels=channels)
    states = torch.randn(len(documents), 4, 16, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    states.requires_grad_()
    bounds = list(itertools.accumulate(documents, initial=0))
    found = op.reference(
        **given,
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.tensor(bounds, dtype=index),
    )
    alone = []
    for i, (a, b) in enumerate(itertools.pairwise(bounds)):
        if a == b:
            alone.append((given["value"][:, :0], states[i : i + 1]))
        else:
            alone.append(token_by_token(**{n: t[:, a:b] for n, t in given.items()}, initial_state=states[i : i + 1]))
    expected = torch.cat([out for out, _ in alone], 1), torch.cat([state for _, state in alone])
    assert_same(found, expected)
    leaves = [*given.values(), states]
    assert_same(gradients(found, leaves), gradients(expected, leaves), atol=1e-11)


def test_documents_are_independent():
    given = inputs(100, dtype=torch.float32)
    other = {n: t.detach().clone() for n, t in given.items()}
    other["value"][:, :70] = 1e6
    cu_seqlens = torch.tensor([0, 70, 100])
    out = [op.reference(**each, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens)[0] for each in (given, other)]
    assert torch.equal(out[0][:, 70:], out[1][:, 70:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_matches_transformers(dtype):
    upstream = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    given = inputs(150, batch=2, k_heads=4, heads=4, dtype=dtype)
    # The model computes the decay in fp32.
    given["g"] = given["g"].detach().float().requires_grad_()
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected = upstream.torch_chunk_gated_delta_rule(**given, **options)
    found = op.reference(**given, **options)
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    # In fp32 both round sums of 16 channels and up to 64 tokens, in orders that depend on the CPU: sqrt(80) / 2 units
    # in the last place each, if roundings are independent.
    units = 80**0.5 if dtype == torch.float32 else 1
    assert_same(found[:1], expected[:1], atol=units * torch.finfo(dtype).eps * expected[0].abs().max().item())
    assert_same(found[1:], expected[1:], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_does_not_downcast_matmuls_of_the_scan(dtype):
    given = inputs(150, dtype=dtype)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    with torch.autocast("cpu", torch.bfloat16):
        found = op.reference(**given, **options)
    assert_same(found, op.reference(**given, **options), atol=0)


def test_empty_input():
    given = inputs(0)
    out, state = op.reference(**given, output_final_state=True)
    assert out.shape == (1, 0, 4, 24)
    assert torch.equal(state, torch.zeros(1, 4, 16, 24, dtype=torch.float64))


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"value": torch.zeros(1, 8, 3, 24)}, "value"),
        ({"query": torch.zeros(1, 7, 2, 16)}, "query"),
        ({"initial_state": torch.zeros(2, 4, 16, 24)}, "initial_state"),
        ({"cu_seqlens": torch.tensor([0, 4, 8]), "initial_state": torch.zeros(1, 4, 16, 24)}, "initial_state"),
    ],
)
def test_invalid_arguments_raise_with_the_argument(change, argument):
    with pytest.raises(KernelError, match=f"cannot take {argument}"):
        op.reference(**(inputs(8, dtype=torch.float32) | change))


@pytest.mark.parametrize("name", ["triton", "torch_chunked"])
@pytest.mark.parametrize(
    ("offsets", "message"), [([0, 5], "ends with 5 where there are 9"), ([2, 9], "not rising from 0")]
)
def test_cu_seqlens_that_omit_tokens_raise(name, offsets, message):
    kernel = KERNEL_REGISTRY.load("chunk_gated_delta_rule", "standard", name)
    with pytest.raises(KernelError, match=f"cu_seqlens: .*{message}"):
        kernel(**inputs(9, dtype=torch.float32), cu_seqlens=torch.tensor(offsets))


@pytest.mark.parametrize(("dynamic", "lengths"), [(None, (70, 9)), pytest.param(True, (70,), marks=pytest.mark.slow)])
def test_reference_compiles_with_fullgraph_at_several_lengths(dynamic, lengths):
    """Compiling one symbolic length takes seconds; without `dynamic`, the second is symbolic too."""
    torch._dynamo.reset()
    compiled = torch.compile(op.reference, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in lengths:
        given = inputs(length, batch=2, dtype=torch.float32)
        torch.testing.assert_close(compiled(**given)[0], op.reference(**given)[0])


def test_document_that_crosses_rows_raises():
    with pytest.raises(KernelError, match="cannot take cu_seqlens: a document crosses token 8, where a row of 8 ends"):
        op.reference(**inputs(8, batch=2), cu_seqlens=torch.tensor([0, 16]))


@pytest.mark.parametrize(
    ("capability", "triton", "tilelang", "unsupported"),
    [
        ((9, 0), "3.6.0", False, True),
        ((9, 0), "3.7.0+git1234", False, True),
        ((9, 0), "3.7.1", False, False),
        ((9, 0), "3.3.1", False, False),
        ((9, 0), "3.6.0", True, False),
        ((8, 0), "3.6.0", False, False),
    ],
)
def test_fla_raises_where_triton_miscomputes_its_gradients(monkeypatch, capability, triton, tilelang, unsupported):
    monkeypatch.setattr("opslot.slots.spec.package_version", lambda name: triton)
    monkeypatch.setattr("opslot.slots.spec.has_package", lambda name: name == "triton" or tilelang)
    request = KernelRequest(room.OP.name, "standard", DeviceFacts("gpu", capability, "a GPU"))
    reason = KERNEL_REGISTRY.get(room.OP.name, "standard", "fla").supports(request)
    assert ("install Triton 3.7.1 or tilelang" in (reason or "")) == unsupported


def load_triton(g):
    """The kernel of the variant of the decays `g`."""
    return KERNEL_REGISTRY.load("chunk_gated_delta_rule", "per_channel" if g.dim() == 4 else "standard", "triton")


def assert_like_fp64(arguments, rtol=1e-5, want=(True, True)):
    """Compare the kernel in fp32 with the reference in fp64, gradients too; `want`: the outputs used in the loss."""
    wide = to_float64(arguments)
    found, expected = load_triton(arguments["g"])(**arguments), op.reference(**wide)
    for got, exact in zip(found, expected, strict=True):
        assert (got is None) == (exact is None)
    pairs = [(got, exact) for got, exact in zip(found, expected, strict=True) if got is not None]
    rooted = [pair for pair, wanted in zip(pairs, want, strict=False) if wanted]
    got, exact = ([pair[i] for pair in rooted] for i in (0, 1))
    pairs += zip(gradients(got, leaves_of(arguments)), gradients(exact, leaves_of(wide)), strict=True)
    for got, exact in pairs:
        torch.testing.assert_close(got.double(), exact, rtol=0, atol=rtol * max(1.0, exact.abs().max().item()))


@pytest.mark.quick("True-*", "False-channels2")
@pytest.mark.parametrize(("l2norm", "channels"), [(True, ()), (False, ()), (False, (24,))])
def test_triton_states_of_packed_documents(l2norm, channels):
    documents = [3, 66, 0, 1]
    sizes = {"k_heads": 2, "heads": 2 if l2norm else 4, "width": 24, "v_width": 40, "channels": channels}
    given = inputs(sum(documents), dtype=torch.float32, **sizes)
    if not l2norm:
        given["key"] = (given["key"].detach() * 0.1).requires_grad_()
    heads = given["value"].shape[2]
    states = torch.randn(4, heads, 24, 40, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(documents)], dtype=torch.int64)
    given |= {"initial_state": states.requires_grad_(), "cu_seqlens": cu_seqlens}
    assert_like_fp64(given | {"output_final_state": True, "use_qk_l2norm_in_kernel": l2norm})


def test_triton_gradients_from_the_final_state_alone():
    given = inputs(65, k_heads=1, heads=1, dtype=torch.float32)
    given["query"] = given["query"].detach()
    assert_like_fp64(given | {"output_final_state": True, "use_qk_l2norm_in_kernel": True}, want=(False, True))


def test_triton_is_accurate_with_equal_keys_and_strong_decay():
    """The worst-conditioned case: every token overwrites the previous one; sums of the log decay reach -700."""
    given = inputs(70, k_heads=1, heads=2, dtype=torch.float32)
    given["key"] = given["key"].detach()[:, :1].expand(-1, 70, -1, -1).clone().requires_grad_()
    given["beta"] = torch.ones(1, 70, 2, requires_grad=True)
    given["g"] = torch.tensor([0.0, -10.0]).expand(1, 70, 2).clone().requires_grad_()
    assert_like_fp64(given | {"use_qk_l2norm_in_kernel": True}, rtol=5e-5)


def test_triton_gradient_of_strong_decays_shared_by_heads():
    """What cancels in the gradient of the decays is many times larger than that, and A_log multiplies it."""
    found, eager, exact = [], [], []
    generator = torch.Generator().manual_seed(0)
    rate = torch.rand(6, generator=generator) * 16
    given = inputs(40, k_heads=2, heads=6, width=24, v_width=40, dtype=torch.float32)
    g = -rate * torch.nn.functional.softplus(torch.randn(1, 40, 6, generator=generator))
    given = {name: x.detach() for name, x in given.items() if isinstance(x, torch.Tensor)} | {"g": g}
    for errors, kernel, own in (
        (found, load_triton(g), given),
        (eager, op.reference, given),
        (exact, op.reference, to_float64(given)),
    ):
        decays = own["g"].detach().requires_grad_()
        out = kernel(**(own | {"g": decays}), use_qk_l2norm_in_kernel=True)[0]
        (gradient,) = torch.autograd.grad(out.square().sum(), decays)
        errors.append((gradient * decays.detach()).sum(1).double())
    error, eager_error = (torch.linalg.norm(x[0] - exact[0]).item() for x in (found, eager))
    assert error < eager_error


def test_triton_is_accurate_with_strong_decays_of_channels():
    """exp(-G) of a chunk overflows; some channels do not decay at all, and keys are nearly equal."""
    given = inputs(70, k_heads=1, heads=2, channels=(16,), dtype=torch.float32)
    strength = torch.tensor([0.0, 1.0, 20.0, 1000.0]).repeat(4)
    given["g"] = (given["g"].detach() * strength).requires_grad_()
    given["key"] = (given["key"].detach() * 0.1 + given["key"].detach()[:, :1]).requires_grad_()
    assert_like_fp64(given | {"use_qk_l2norm_in_kernel": True}, rtol=5e-5)


@pytest.mark.parametrize(("l2norm", "channels"), [(True, ()), (False, ()), (True, (64,))])
def test_triton_bf16_gradients_are_within_the_unit_roundoff(l2norm, channels):
    """Decays within a chunk cancel in g's gradient only where both are computed from the same rounded values.

    With decays of channels, keys and queries are rounded again after they are multiplied by them.
    """
    given = inputs(130, k_heads=1, heads=2, width=64, v_width=64, dtype=torch.bfloat16, channels=channels)
    given["g"] = given["g"].detach().float().requires_grad_()
    if not l2norm:
        given["key"] = (given["key"].detach() / 8).requires_grad_()
    exact = to_float64(given)
    found = load_triton(given["g"])(**given, use_qk_l2norm_in_kernel=l2norm)[:1]
    expected = op.reference(**exact, use_qk_l2norm_in_kernel=l2norm)[:1]
    pairs = zip(gradients(found, leaves_of(given)), gradients(expected, leaves_of(exact)), strict=True)
    errors = {name: ((got - want).norm() / want.norm()).item() for name, (got, want) in zip(given, pairs, strict=True)}
    assert max(errors.values()) <= (1.25 if channels else 1) * torch.finfo(torch.bfloat16).eps / 2, errors


@pytest.mark.parametrize(("beta", "channels"), [(0.0, ()), (-0.5, ()), (1e-30, ()), (0.0, (16,))])
def test_triton_gradients_of_zero_negative_and_tiny_beta(beta, channels):
    given = inputs(70, k_heads=1, heads=2, dtype=torch.float32, channels=channels)
    changed = given["beta"].detach().clone()
    changed[:, ::3] = beta
    given["beta"] = changed.requires_grad_()
    assert_like_fp64(given | {"use_qk_l2norm_in_kernel": True})


def test_triton_gradients_are_the_same_with_less_shared_memory(monkeypatch):
    """In float32 the loads of GPUs with 99 KiB have another order."""
    from opslot.ops.chunk_gated_delta_rule.kernels import call

    given = inputs(70, k_heads=1, heads=2, dtype=torch.float32, channels=(16,))
    expected = gradients(load_triton(given["g"])(**given)[:1], leaves_of(given))
    monkeypatch.setattr(call, "shared_memory", lambda device: 99 * 1024)
    assert call.prepare(list(given.values()), None, False).plan.keys_last
    found = gradients(load_triton(given["g"])(**given)[:1], leaves_of(given))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("channels", [(), (16,)])
def test_triton_reads_strided_heads_without_copying(channels):
    given = inputs(20, batch=2, k_heads=1, heads=2, dtype=torch.float32, channels=channels)
    triton = load_triton(given["g"])
    mixed = torch.cat([given[n].detach().flatten(2) for n in ("query", "key", "value")], -1)
    q, k, v = mixed.split([16, 16, 48], -1)
    views = {"query": q.unflatten(2, (1, 16)), "key": k.unflatten(2, (1, 16)), "value": v.unflatten(2, (2, 24))}
    found, _ = triton(**(given | views))
    expected, _ = triton(**given)
    assert torch.equal(found, expected)
    # Batch rows that are not contiguous are copied.
    turned = {n: t.transpose(0, 1).contiguous().transpose(0, 1) for n, t in given.items()}
    assert torch.equal(triton(**turned)[0], expected)


@pytest.mark.quick("documents*")
@pytest.mark.parametrize(("documents", "channels"), [(None, ()), ([129, 0, 1, 65], ()), ([70, 0, 1], (16,))])
def test_triton_split_documents(monkeypatch, documents, channels):
    """Parts of a document in parallel, with more parts than some documents have chunks."""
    from opslot.ops.chunk_gated_delta_rule.kernels import call

    counts = []
    monkeypatch.setattr(call, "segments_for", lambda *args: counts.append(args) or 3)
    given = inputs(sum(documents or [195]), k_heads=1, heads=2, dtype=torch.float32, channels=channels)
    rows = len(documents or [195])
    states = torch.randn(rows, 2, 16, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    given["initial_state"] = states.requires_grad_()
    if documents:
        given["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(documents)])
    assert_like_fp64(given | {"output_final_state": True, "use_qk_l2norm_in_kernel": True})
    assert counts


def test_documents_are_split_where_programs_do_not_fill_the_gpu():
    from opslot.ops.chunk_gated_delta_rule.kernels.call import segments_for

    assert segments_for(programs=16, chunks=512, key=128, sms=132) == 8
    assert segments_for(programs=64, chunks=512, key=128, sms=132) == 1
    assert segments_for(programs=16, chunks=16, key=128, sms=132) == 1
    assert segments_for(programs=200, chunks=512, key=128, sms=132) == 1
    # A transition of wider keys does not fit into registers.
    assert segments_for(programs=16, chunks=512, key=256, sms=132) == 1


@pytest.mark.parametrize("documents", [[64], [1] * 300, [0, 65, 0, 0, 128, 1, 63], [5] * 129 + [1000]])
def test_chunk_table(documents):
    from opslot.ops._common.kernels.chunks import chunk_table

    bounds = list(itertools.accumulate(documents, initial=0))
    found = chunk_table(torch.tensor(bounds), 1, bounds[-1], torch.device("cpu"), 64)
    expected = [
        (start, min(64, stop - start)) for a, stop in itertools.pairwise(bounds) for start in range(a, stop, 64)
    ]
    table = list(zip(found.start.tolist(), found.length.tolist(), strict=True))
    assert table[: len(expected)] == expected
    assert [length for _, length in table[len(expected) :]] == [0] * (found.count - len(expected))
    assert found.first.tolist() == list(itertools.accumulate([-(-n // 64) for n in documents], initial=0))


@pytest.mark.parametrize("channels", [(), (16,)])
def test_triton_empty_input(channels):
    given = inputs(0, dtype=torch.float32, channels=channels)
    states = torch.randn(1, 4, 16, 24, requires_grad=True)
    triton = load_triton(given["g"])
    out, final = triton(**given, initial_state=states, output_final_state=True)
    assert out.shape == (1, 0, 4, 24)
    assert torch.equal(final, states)
    (dstates,) = torch.autograd.grad(final.square().sum(), states)
    assert torch.equal(dstates, 2 * states.detach())
    assert torch.equal(triton(**given, output_final_state=True)[1], torch.zeros(1, 4, 16, 24))


@pytest.mark.parametrize("channels", [(), (16,)])
def test_triton_compiles_with_fullgraph(channels):
    given = inputs(3, k_heads=1, heads=1, dtype=torch.bfloat16, channels=channels)
    options = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": torch.tensor([0, 1, 3])}
    kernel = load_triton(given["g"])
    compiled = torch.compile(lambda **given: kernel(**given, **options)[0], fullgraph=True, backend="aot_eager")
    expected, found = kernel(**given, **options)[0], compiled(**given)
    assert torch.equal(found, expected)
    leaves = list(given.values())
    for got, want in zip(gradients([found], leaves), gradients([expected], leaves), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"query": torch.zeros(1, 8, 2, 16, dtype=torch.float64)}, "query"),
        ({"key": torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16)}, "key"),
        ({"key": torch.zeros(1, 8, 2, 257)}, "key"),
        ({"value": torch.zeros(1, 8, 3, 24)}, "value"),
        ({"initial_state": torch.zeros(2, 4, 16, 24)}, "initial_state"),
        ({"beta": torch.zeros(1, 8, 4, dtype=torch.float64)}, "beta"),
        ({"query": torch.zeros(2, 8, 2, 16)}, "query"),
        ({"value": torch.zeros(1, 7, 4, 24)}, "value"),
        ({"g": torch.zeros(1, 8, 2)}, "g"),
        ({"beta": torch.zeros(1, 7, 4)}, "beta"),
    ],
)
def test_triton_errors_name_kernel_and_argument(change, argument):
    given = inputs(8, dtype=torch.float32) | change
    with pytest.raises(KernelError, match=f"chunk_gated_delta_rule_implementation='triton' cannot take {argument}"):
        load_triton(given["g"])(**given)


@pytest.mark.parametrize(("key", "value"), [(8, 8), (24, 40), (32, 128), (128, 16)])
def test_tiles_in_16_bit_have_one_layout_in_shared_memory(key, value):
    """See plan_for: ptxas 12.8 computes wrong addresses where narrower tiles are mixed with these."""
    pytest.importorskip("triton")
    from opslot.ops.chunk_gated_delta_rule.kernels.call import plan_for

    plan = plan_for(key, value, 2, 227 * 1024)
    assert min(plan.key, plan.key_block, plan.state_block, plan.value_block) >= 64


# Key and value heads of Qwen3-Next: FlashQLA compiles for minutes for others.
HEADS = 16, 32


def usable(name, variant="standard"):
    spec = KERNEL_REGISTRY.get("chunk_gated_delta_rule", variant, name)
    if not torch.cuda.is_available() or spec.unsupported(KernelRequest(spec.op_name, variant, facts_of("cuda"))):
        pytest.skip(f"{name} cannot run here")
    return KERNEL_REGISTRY.load(*spec.key)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["triton", "flash_qla"])
@pytest.mark.parametrize("decay", [0.0, 0.01, 1.0, 50.0])
@pytest.mark.parametrize("lengths", [(3000,), (8192,), (1700, 1, 64, 935, 300)], ids=str)
def test_training_lengths_on_a_gpu_are_as_good_as_eager(name, decay, lengths):
    """With states that never decay, and that decay within a token: FlashQLA leaves out what has decayed."""
    kernel = usable(name)

    def make(dtype, device, generator):
        given = inputs(sum(lengths), 1, *HEADS, 128, 128, dtype=dtype, device=device, generator=generator)
        given = {argument: tensor.detach() for argument, tensor in given.items()}
        given |= {"g": given["g"] * decay, "use_qk_l2norm_in_kernel": True}
        if len(lengths) > 1:
            given["cu_seqlens"] = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        return given

    variant = room.OP.variant("standard")
    result = check_kernel(kernel, room.OP.name, variant, InputCase("", make), torch.bfloat16, "cuda", name=name)
    assert result.ok, str(result)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_flash_qla_is_deterministic():
    kernel = usable("flash_qla")
    given = inputs(3000, 1, *HEADS, 128, 128, dtype=torch.bfloat16, device="cuda")
    first, second = (
        [out, *gradients([out], list(given.values()))]
        for out, _ in (kernel(**given, use_qk_l2norm_in_kernel=True) for _ in range(2))
    )
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True] * len(first)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("name", "variant", "width", "v_width", "backward"),
    [
        ("fla", "standard", 64, 64, False),
        ("triton", "standard", 128, 128, True),
        ("fla", "per_channel", 64, 64, True),
        ("triton", "per_channel", 128, 128, True),
        ("triton", "per_channel", 256, 256, True),
        ("triton", "per_channel", 24, 40, True),
        ("triton", "per_channel", 192, 96, True),
        ("triton", "standard", 24, 40, True),
        ("flash_qla", "standard", 128, 128, True),
    ],
)
def test_kernels_pass_states_from_call_to_call(name, variant, width, v_width, backward):
    """The final states of one call are the initial states of the next, within the error of bf16 matmuls."""
    kernel = usable(name, variant)
    channels = (width,) if variant == "per_channel" else ()
    k_heads, heads = HEADS if name == "flash_qla" else (2, 4)
    given = inputs(200, 1, k_heads, heads, width, v_width, dtype=torch.bfloat16, device="cuda", channels=channels)
    cu_seqlens = torch.tensor([0, 120, 200], device="cuda", dtype=torch.int32)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    state = (0.1 * torch.randn(2, heads, width, v_width, device="cuda")).requires_grad_()
    found = kernel(**given, **options, initial_state=state, cu_seqlens=cu_seqlens)
    wide, wide_state = to_float64(given), state.detach().double().requires_grad_()
    expected = op.reference(**wide, **options, initial_state=wide_state, cu_seqlens=cu_seqlens)
    if backward:
        found += gradients(found, [*given.values(), state])
        expected += gradients(expected, [*wide.values(), wide_state])
    for got, want in zip(found, expected, strict=True):
        assert (got.double() - want).norm() <= 1e-2 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [(), (128,)])
@pytest.mark.parametrize("captured", [False, True])
def test_both_recurrences_of_backward_at_the_same_time_give_the_same_gradients(channels, captured, monkeypatch):
    from opslot.ops.chunk_gated_delta_rule.kernels import backward

    kernel = KERNEL_REGISTRY.load("chunk_gated_delta_rule", "per_channel" if channels else "standard", "triton")
    heads = 32 if channels else 16
    given = inputs(2048, 1, heads, 32, 128, 128, dtype=torch.bfloat16, device="cuda", channels=channels)

    def step():
        out, _ = kernel(**given, use_qk_l2norm_in_kernel=True)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), list(given.values()))]

    with monkeypatch.context() as patch:
        patch.setattr(backward, "launch_concurrently", lambda device, first, second: (first(), second()))
        wanted = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = step()
    stream.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        for x in found:
            x.zero_()
        graph.replay()
    for _ in range(1 if captured else 20):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        found = found if captured else step()


HOPPER = DeviceFacts("gpu", (9, 0))


@pytest.mark.parametrize(
    ("variant", "device", "dtype", "chosen"),
    [
        ("standard", HOPPER, torch.bfloat16, "triton"),
        ("standard", HOPPER, torch.float16, "triton"),
        ("standard", HOPPER, torch.float32, "eager"),
        ("per_channel", HOPPER, torch.float32, "triton"),
        ("standard", DeviceFacts("cpu"), torch.float32, "torch_chunked"),
    ],
)
def test_auto_selects_the_benchmarked_kernel(variant, device, dtype, chosen):
    pytest.importorskip("triton")
    resolution = KERNEL_REGISTRY.resolve(KernelRequest("chunk_gated_delta_rule", variant, device, dtype))
    assert resolution.chosen == chosen
    assert resolution.why.endswith("pass dtype=torch.bfloat16") is (device is HOPPER and chosen == "eager")


def test_unsupported_key_size_is_reported_when_bound():
    pytest.importorskip("triton")
    module = torch.nn.Module()
    gpu = DeviceFacts("gpu", (9, 0))
    for width, chosen in ((256, "triton"), (512, "eager")):
        module.head_k_dim = width
        request = KernelRequest("chunk_gated_delta_rule", "standard", gpu, torch.bfloat16, module)
        assert KERNEL_REGISTRY.resolve(request).chosen == chosen
    with pytest.raises(ConfigError, match="keys up to 256 wide, this module's are 512"):
        KERNEL_REGISTRY.resolve(request, "triton")


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "supported"),
    [
        ((8, 9), torch.float32, 256, False),
        ((12, 0), torch.float32, 129, False),
        ((8, 9), torch.float32, 128, True),
        ((8, 9), torch.bfloat16, 256, True),
        ((9, 0), torch.float32, 256, True),
    ],
)
def test_wide_keys_in_float32_need_more_than_99_kib(capability, dtype, width, supported):
    pytest.importorskip("triton")
    module = torch.nn.Module()
    module.head_k_dim = width
    request = KernelRequest("chunk_gated_delta_rule", "standard", DeviceFacts("gpu", capability), dtype, module)
    reason = KERNEL_REGISTRY.get(request.op_name, "standard", "triton").supports(request)
    assert (reason is None) == supported
    assert supported or f"up to 128 wide in float32, this module's are {width}" in reason


def test_call_with_wide_keys_in_float32_raises_on_gpus_with_99_kib(monkeypatch):
    given = inputs(8, width=136, dtype=torch.float32)
    kernel = load_triton(given["g"])
    monkeypatch.setattr("opslot.ops.chunk_gated_delta_rule.triton.shared_memory", lambda device: 99 * 1024)
    with pytest.raises(KernelError, match="cannot take key: its heads are 136 wide, the limit is 128 in float32"):
        kernel(**given)


@pytest.mark.parametrize(
    ("capability", "key_width", "value_width", "reason"),
    [
        ((9, 0), 128, 128, None),
        ((10, 0), 128, 128, None),
        ((11, 0), 128, 128, "has kernels for Hopper (compute capability 9.0) and Blackwell (10.0, 10.3, 12.0, 12.1)"),
        ((9, 0), 96, 128, "takes keys 128 wide, this module's are 96"),
        ((9, 0), 128, 192, "takes values 128 wide, this module's are 192"),
    ],
)
def test_flash_qla_serves_the_sizes_and_gpus_that_it_is_written_for(capability, key_width, value_width, reason):
    module = torch.nn.Module()
    module.head_k_dim, module.head_v_dim = key_width, value_width
    gpu = DeviceFacts("gpu", capability)
    request = KernelRequest("chunk_gated_delta_rule", "standard", gpu, torch.bfloat16, module)
    assert KERNEL_REGISTRY.get(request.op_name, "standard", "flash_qla").supports(request) == reason


@pytest.fixture
def library(monkeypatch):
    """A stand-in for FlashQLA that computes by the reference, and keeps its keyword arguments."""
    calls = []

    def chunk_gated_delta_rule(q, k, v, g, beta, **options):
        calls.append(options)
        return op.reference(q, k, v, g, beta, **options)

    module = types.ModuleType("flash_qla")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule
    monkeypatch.setitem(sys.modules, "flash_qla", module)
    monkeypatch.delitem(sys.modules, "opslot.ops.chunk_gated_delta_rule.flash_qla", raising=False)
    yield calls
    sys.modules.pop("opslot.ops.chunk_gated_delta_rule.flash_qla", None)


def test_layers_pass_flash_qla_the_same_cu_seqlens(library):
    """FlashQLA reads their values on the host once for each tensor."""
    kernel = KERNEL_REGISTRY.load("chunk_gated_delta_rule", "standard", "flash_qla")
    given = inputs(20, 2, 1, 2, 128, 128, dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, 9, 20, 40], dtype=torch.int32)
    outputs = [kernel(**given, cu_seqlens=cu_seqlens)[0] for _ in range(2)]
    assert [options["cu_seqlens"] is cu_seqlens for options in library] == [True, True]
    assert torch.equal(*outputs)
    torch.testing.assert_close(outputs[0], op.reference(**given, cu_seqlens=cu_seqlens)[0])


def test_flash_qla_rejects_empty_documents(library, monkeypatch):
    kernel = KERNEL_REGISTRY.load("chunk_gated_delta_rule", "standard", "flash_qla")

    def fail(*tensors, **options):
        raise ValueError("invalid sequence lengths: [1, 0, 1]")

    monkeypatch.setattr("opslot.ops.chunk_gated_delta_rule.flash_qla.flash_qla_chunk", fail)
    given = inputs(40, 1, 1, 2, 128, 128, dtype=torch.bfloat16)
    with pytest.raises(KernelError, match=r"flash_qla' cannot take cu_seqlens: a document is empty"):
        kernel(**given, cu_seqlens=torch.tensor([0, 9, 9, 40], dtype=torch.int32))
