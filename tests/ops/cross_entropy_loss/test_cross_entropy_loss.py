"""Fused losses: extreme values, chunks, memory, autograd contexts, compile, errors."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from opslot import KERNEL_REGISTRY
from opslot._base.device import CPU, DeviceFacts
from opslot._base.errors import ConfigError, KernelError
from opslot.ops.cross_entropy_loss import chunked
from opslot.ops.cross_entropy_loss.cases import _case
from opslot.ops.cross_entropy_loss.op import OP
from opslot.slots import KernelRequest
from opslot.verify.parity import DRAWS, CheckResult, compare, expect, mean_of
from tests.ops.cross_entropy_loss.inputs import DEVICE, KERNELS, inputs, load


def reference(variant="causal"):
    return OP.variant(variant).reference


def gradients(kernel, hidden, weight, labels, factor=1.0, **options):
    loss = kernel(hidden, weight, labels, **options)
    return loss.detach(), *torch.autograd.grad(loss * factor, (hidden, weight))


def assert_same(found, expected, rtol=2e-5, atol=2e-6):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of four tokens, the last one smaller."""
    monkeypatch.setattr(chunked, "_ROW_TILE", 1)
    monkeypatch.setattr(chunked, "_chunk_rows", lambda backend, hidden, vocab: 4)


def test_loss_equals_transformers(name):
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    hidden, weight, labels = inputs(grad=False)
    for options in ({}, {"num_items_in_batch": 11}, {"num_items_in_batch": torch.tensor(11)}, {"ignore_index": 3}):
        expected = loss_utils.ForCausalLMLoss(F.linear(hidden, weight), labels.clamp_min(0), 37, **options)
        found = load(name)(hidden, weight, labels.clamp_min(0), position_ids=None, **options)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chunks_sum_to_the_whole(name, dtype, small_chunks):
    """19 tokens in chunks of 4 are five chunks; from 8 chunks on, a 16-bit sum is accumulated in float32."""
    tolerance = {torch.float32: (2e-5, 2e-6), torch.bfloat16: (3e-2, 2e-3), torch.float16: (3e-3, 2e-4)}[dtype]
    for rows in ((1, 19), (3, 13)):
        arguments = inputs(rows, dtype=dtype)
        assert_same(gradients(load(name), *arguments), gradients(reference(), *arguments), *tolerance)


@pytest.mark.quick("chunk_loss-*", "triton-*-dtype0", "batch_invariant-token_log_probs-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["causal", "token_log_probs"])
@pytest.mark.parametrize("kernel_name", [*KERNELS, "batch_invariant"])
def test_adapters_of_the_head(kernel_name, variant, dtype, small_chunks):
    """LoRA of the module `head` is added to the logits, as if its product were in the weight."""
    peft = pytest.importorskip("peft")
    hidden, _, labels = inputs((3, 13), dtype=dtype)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["0"], init_lora_weights=False)
    layers = nn.Sequential(nn.Linear(16, 37, device=DEVICE, dtype=dtype))
    head = peft.get_peft_model(layers, config).base_model.model[0]
    a, b = head.lora_A["default"].weight, head.lora_B["default"].weight
    given = {"bias": head.bias, "softcap": 3.0, "logit_scale": 1.5}

    def run(kernel, weight, **options):
        out = kernel(hidden, weight, labels, **given, **options)
        out = out[0].sum() + 0.3 * out[1].sum() if isinstance(out, tuple) else out
        return out.detach(), *torch.autograd.grad(out, (hidden, a, b))

    found = run(load(kernel_name, variant), head.weight, head=head)
    expected = run(reference(variant), head.weight + (b @ a * (5 / 3)).to(dtype))
    assert_same(found, expected, *((2e-5, 2e-6) if dtype == torch.float32 else (5e-2, 5e-2)))


@pytest.mark.parametrize("variant", ["causal", "token_log_probs"])
def test_bias(name, variant, small_chunks):
    hidden, weight, labels = inputs((3, 13))
    bias = torch.randn(37, device=DEVICE, requires_grad=True)

    def run(kernel):
        out = kernel(hidden, weight, labels, bias=bias, softcap=3.0, logit_scale=1.5)
        out = out[0].sum() + 0.3 * out[1].sum() if isinstance(out, tuple) else out
        return out.detach(), *torch.autograd.grad(out, (hidden, weight, bias))

    assert_same(run(load(name, variant)), run(reference(variant)))


@pytest.mark.parametrize("factor_last", [False, True])
def test_many_chunks_accumulate_accurately(factor_last, monkeypatch):
    """Equal addends: a bfloat16 sum stops growing at 256 times the addend, a float32 sum does not."""
    monkeypatch.setattr(chunked, "_chunk_rows", lambda backend, hidden, vocab: 1)
    steps = importlib.import_module("opslot.ops.cross_entropy_loss.chunk_loss")
    backend = chunked.Backend(
        "x",
        steps.loss_step,
        steps.token_step,
        steps.token_grad_step,
        steps.rescale,
        steps.rows,
        factor_last=factor_last,
    )
    hidden, weight = torch.ones(400, 8, dtype=torch.bfloat16), torch.zeros(16, 8, dtype=torch.bfloat16)
    labels, divisor = torch.zeros(400, dtype=torch.long), torch.tensor(400.0)
    shaping = chunked.Shaping(-100, 0.0, 0.0, 1.0)
    wanted = (True, True, False, False, False)
    _, (_, found, *_) = chunked.loss_and_gradients(
        backend, chunked.Head(hidden, weight), labels, divisor, shaping, wanted
    )
    expected = torch.full((16, 8), 1 / 16)
    expected[0] = 1 / 16 - 1
    # Rounded to bfloat16 twice: each logit's gradient, and the sum.
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=0)


def test_float64_input_gives_a_float64_loss():
    hidden, weight, labels = inputs(dtype=torch.float64)
    found, expected = (gradients(k, hidden, weight, labels) for k in (load("chunk_loss"), reference()))
    assert_same(found, expected, rtol=1e-12, atol=1e-14)


def test_gradcheck():
    hidden, weight, labels = inputs((2, 4), width=5, vocab=7, dtype=torch.float64)
    options = {"label_smoothing": 0.2, "softcap": 2.0, "logit_scale": 1.5}
    assert torch.autograd.gradcheck(lambda h, w: load("chunk_loss")(h, w, labels, **options), (hidden, weight))
    tokens = load("chunk_loss", "token_log_probs")
    assert torch.autograd.gradcheck(lambda h, w: tokens(h, w, labels, softcap=2.0, logit_scale=1.5), (hidden, weight))


def test_confident_predictions_keep_precision(name):
    """p = 1 - 3e-12 in float32: p - 1 by subtraction would be 0, and so would the loss."""
    weight = torch.tensor([[26.5], [0.0]], device=DEVICE, requires_grad=True)
    hidden = torch.ones(1, 1, device=DEVICE, requires_grad=True)
    labels = torch.zeros(1, dtype=torch.long, device=DEVICE)
    loss, _, grad = gradients(load(name, "sequence_classification"), hidden, weight, labels)
    rest = torch.tensor(-26.5, dtype=torch.float64).exp()
    torch.testing.assert_close(loss.double().cpu(), torch.log1p(rest), rtol=1e-5, atol=0)
    torch.testing.assert_close(grad.double().cpu(), torch.stack((-rest, rest)).unsqueeze(1), rtol=1e-5, atol=0)


def test_zero_probability_labels_have_a_finite_loss(name):
    """p = exp(-200) is 0 in float32; its logarithm is finite."""
    weight = torch.tensor([[-100.0], [100.0]], device=DEVICE, requires_grad=True)
    hidden = torch.ones(1, 1, device=DEVICE, requires_grad=True)
    labels = torch.zeros(1, dtype=torch.long, device=DEVICE)
    loss, _, grad = gradients(load(name, "sequence_classification"), hidden, weight, labels)
    assert loss.item() == 200.0
    assert grad.flatten().tolist() == [-1.0, 1.0]


def test_ignored_tokens_have_zero_gradients(name):
    hidden, weight, labels = inputs((2, 30))
    labels[0] = -100
    _, grad, _ = gradients(load(name), hidden, weight, labels)
    assert grad[0].count_nonzero() == 0
    assert grad[1, -1].count_nonzero() == 0
    assert grad[1, 3].count_nonzero() > 0


def test_all_labels_ignored(name):
    """Transformers' mean over no label is NaN, and its gradients are 0."""
    hidden, weight, labels = inputs()
    labels.fill_(-100)
    found, expected = (gradients(k, hidden, weight, labels) for k in (load(name), reference()))
    assert found[0].isnan()
    assert expected[0].isnan()
    for grad in (*found[1:], *expected[1:]):
        assert grad.count_nonzero() == 0


def test_results_are_deterministic(name, small_chunks):
    arguments = inputs((4, 11))
    first, second = (gradients(load(name), *arguments) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_policy_gradient_equals_the_causal_loss(name):
    """Minus the mean log-probability is the causal loss, value and gradients."""
    hidden, weight, labels = inputs()
    tokens = load(name, "token_log_probs")

    def loss(h, w, y):
        log_probs, entropy = tokens(h, w, y)
        assert log_probs.shape == entropy.shape == y.shape
        return -log_probs.sum() / (y[:, 1:] != -100).sum()

    assert_same(gradients(loss, hidden, weight, labels), gradients(load(name), hidden, weight, labels))


def test_log_probs_with_tokens_that_cannot_occur(name):
    """Gradients of log-probabilities are eager's, and the entropy is that of the other tokens."""
    hidden, weight, labels = inputs()
    bias = torch.zeros(37)
    bias[torch.tensor([0, *range(20, 37)])] = float("-inf")
    labels = labels.where(labels < 0, labels % 19 + 1)

    def log_probs(kernel):
        return lambda h, w, y: kernel(h, w, y, bias=bias)[0].sum()

    kernel = load(name, "token_log_probs")
    eager = reference("token_log_probs")
    expected = gradients(log_probs(eager), hidden, weight, labels)
    assert_same(gradients(log_probs(kernel), hidden, weight, labels), expected)
    found = gradients(lambda h, w, y: kernel(h, w, y, bias=bias)[1].sum(), hidden, weight, labels)
    possible = weight.detach()[1:20].requires_grad_()
    expected = gradients(lambda h, w, y: eager(h, w, y - (y > 0).long())[1].sum(), hidden, possible, labels)
    assert_same((*found[:2], found[2][1:20]), expected)
    assert not found[2][20:].any()


def test_entropy_of_a_uniform_distribution(name, small_chunks):
    hidden, weight, labels = inputs()
    log_probs, entropy = load(name, "token_log_probs")(hidden, weight.detach() * 0, labels)
    counts = F.pad(labels, (0, 1), value=-100)[:, 1:] != -100
    log_vocab = torch.tensor(37.0).log().item()
    torch.testing.assert_close(entropy, counts * log_vocab)
    torch.testing.assert_close(log_probs, counts * -log_vocab)


def test_backward_scales_with_the_incoming_gradient(name):
    arguments = inputs()
    for factor in (0.0, 1.0, -3.0):
        found, expected = (gradients(k, *arguments, factor=factor) for k in (load(name), reference()))
        assert_same(found, expected)


def test_float16_gradients_do_not_underflow(name):
    """The loss scale is applied in the backward; p / N alone underflows in float16."""
    hidden, weight, labels = inputs((2, 32), width=32, vocab=2000, dtype=torch.float16)
    options = {"num_items_in_batch": 10_000_000}
    found = gradients(load(name), hidden, weight, labels, factor=2.0**24, **options)
    wide = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    expected = gradients(reference(), *wide, labels, factor=2.0**24, **options)
    for x, y in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(x.float(), y, rtol=2e-2, atol=2e-3 * y.abs().max().item())


def test_backward_twice_with_retain_graph(name):
    hidden, weight, labels = inputs()
    loss = load(name)(hidden, weight, labels) * 2.0
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss, (hidden, weight))
    assert_same(first, kept, 0, 0)
    assert_same(second, kept, 1e-6, 1e-9)


def test_second_derivative_raises(name):
    hidden, weight, labels = inputs()
    loss = load(name)(hidden, weight, labels)
    with pytest.raises(KernelError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize(("by_hidden", "by_weight"), [(True, False), (False, True), (False, False)])
def test_frozen_inputs_compute_no_gradients(name, by_hidden, by_weight, monkeypatch):
    hidden, weight, labels = inputs()
    expected = gradients(reference(), hidden, weight, labels)
    hidden, weight = hidden.detach().requires_grad_(by_hidden), weight.detach().requires_grad_(by_weight)
    matmuls = []
    real = chunked._matmul
    monkeypatch.setattr(chunked, "_matmul", lambda *a, **k: (matmuls.append(1), real(*a, **k)))
    loss = load(name)(hidden, weight, labels)
    assert len(matmuls) == by_hidden + by_weight
    assert loss.requires_grad == (by_hidden or by_weight)
    if loss.requires_grad:
        loss.backward()
    for x, y in ((hidden, expected[1]), (weight, expected[2])):
        assert (x.grad is not None) == x.requires_grad
        if x.requires_grad:
            assert_same((x.grad,), (y,))


def test_no_grad_computes_no_gradients(name, monkeypatch):
    arguments = inputs()
    monkeypatch.setattr(chunked, "_matmul", lambda *a, **k: pytest.fail("a gradient was computed"))
    with torch.no_grad():
        assert not load(name)(*arguments).requires_grad


def test_autocast(name):
    """float32 weights, bfloat16 matmuls, float32 gradients, like an eager head under autocast."""
    hidden, weight, labels = inputs()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        found, expected = (gradients(k, hidden, weight, labels) for k in (load(name), reference()))
    assert {x.dtype for x in found} == {torch.float32}
    assert_same(found, expected, 3e-2, 2e-3)


def test_transposed_weight(name):
    hidden, weight, labels = inputs()
    turned = weight.detach().t().contiguous().t().requires_grad_()
    assert_same(gradients(load(name), hidden, turned, labels, 2.0), gradients(reference(), hidden, weight, labels, 2.0))


def test_compiles_with_fullgraph(name):
    if name == "triton" and DEVICE == "cpu":
        pytest.skip("the interpreter is not a target of torch.compile")
    for variant in ("causal", "token_log_probs"):
        kernel = load(name, variant)

        def loss(h, w, y, kernel=kernel):
            out = kernel(h, w, y)
            return (out[0].sum() + 0.3 * out[1].sum()) if isinstance(out, tuple) else out

        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for rows in ((2, 9), (3, 12)):
            arguments = inputs(rows)
            assert_same(gradients(compiled, *arguments, 1.5), gradients(loss, *arguments, 1.5))
        with torch.no_grad():
            torch.testing.assert_close(compiled(*arguments), loss(*arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_opcheck(name, dtype):
    load(name)
    hidden, weight, labels = inputs(dtype=dtype, grad=False)
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    shaping = (-100, 0.0, 0.0, 1.0)
    tests = ("test_schema", "test_faketensor")
    bias = torch.randn(37, device=DEVICE, dtype=dtype)
    low_rank = torch.randn(hidden.shape[0] + 37, 3, device=DEVICE, dtype=dtype).split([hidden.shape[0], 37])
    cases = (
        (None, None, None, True, True, False, False, False),
        (bias, None, None, False, True, True, False, False),
        (bias, None, None, False, False, False, False, False),
        (None, *low_rank, True, False, False, True, True),
    )
    for *given, w0, w1, w2, w3, w4 in cases:
        divisor = torch.tensor(7.0, device=DEVICE)
        arguments = (hidden, weight, *given, labels, divisor, *shaping, w0, w1, w2, w3, w4)
        op = getattr(torch.ops.opslot, f"linear_cross_entropy_{name}")
        torch.library.opcheck(op.default, arguments, test_utils=tests)
    entropy, *grads = torch.rand(3, hidden.shape[0], device=DEVICE).unbind()
    op = getattr(torch.ops.opslot, f"token_log_probs_{name}")
    torch.library.opcheck(op.default, (hidden, weight, bias, *low_rank, labels, *shaping), test_utils=tests)
    op = getattr(torch.ops.opslot, f"token_log_probs_{name}_backward")
    arguments = (*grads, hidden, weight, bias, *low_rank, labels, entropy, *shaping, True, True, True, True, True)
    torch.library.opcheck(op.default, arguments, test_utils=tests)


def test_chunk_size_fits_the_memory_budget():
    """On CPU a chunk takes 8 MiB, or 128 tokens; on a GPU at most 640 MiB, in chunks of equal size."""
    chunk_loss, triton = (importlib.import_module(f"opslot.ops.cross_entropy_loss.{n}") for n in KERNELS)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert chunk_loss.rows(8192, torch.float32, cpu) * 8192 * 4 == 8 << 20
    assert chunk_loss.rows(151936, torch.float32, cpu) == 128
    assert triton.rows(151936, torch.bfloat16, gpu) == 2048
    backend = chunked.Backend("x", *[None] * 4, rows=lambda *_: 2048)
    for total, expected in ((8192, 2048), (8190, 2048), (2049, 1152), (100, 128), (0, 128)):
        assert chunked._chunk_rows(backend, torch.empty(total, 1), 9) == expected


@pytest.mark.parametrize(
    ("total", "width", "itemsize", "expected"),
    [
        (8192, 3840, 2, 1024),  # 8 chunks within the budget
        (16384, 3840, 2, 2048),  # 8 larger ones instead of 15
        (16000, 3840, 2, 2048),
        (131072, 3840, 2, 1152),  # 8 would take more memory than a float32 gradient of the weight
        (16384, 64, 2, 1152),
        (16384, 3840, 4, 1152),  # float32 needs no other dtype
    ],
)
def test_large_vocabulary_takes_fewer_chunks_than_a_float32_gradient_needs(total, width, itemsize, expected):
    hidden = SimpleNamespace(shape=(total, width), is_cuda=True, element_size=lambda: itemsize, dtype=None, device=None)
    backend = chunked.Backend("x", *[None] * 4, rows=lambda *_: 1152)
    assert chunked._chunk_rows(backend, hidden, 9) == expected


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
def test_peak_memory_of_a_large_vocabulary():
    hidden, weight, labels = inputs((1, 8192), width=1024, vocab=151936, dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients(load("triton"), hidden, weight, labels)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < (640 << 20) + 2 * (weight.numel() + hidden.numel()) + (64 << 20)


class Model(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def get_output_embeddings(self):
        return self.head


def test_heads_with_more_than_a_weight_are_unsupported():
    check = OP.variant("causal").check_module
    assert check(Model(nn.Linear(4, 8, bias=False))) is None
    assert check(nn.Linear(4, 8)) is None
    assert check(Model(nn.Linear(4, 8))) is None
    assert "Sequential" in check(Model(nn.Sequential(nn.Linear(4, 8, bias=False))))


def test_npu_without_npu_raises_with_every_reason():
    with pytest.raises(ConfigError, match=r"npu.*requires an NPU") as caught:
        KERNEL_REGISTRY.resolve(KernelRequest("cross_entropy_loss", "causal", CPU, torch.float32), "npu")
    assert "usable here: eager" in str(caught.value)
    facts = DeviceFacts("npu", name="Ascend NPU")
    reason = KERNEL_REGISTRY.get("cross_entropy_loss", "causal", "npu").unsupported(
        KernelRequest("cross_entropy_loss", "causal", facts, torch.bfloat16)
    )
    assert reason == "requires the package torch_npu, not installed"


@pytest.mark.parametrize(
    ("facts", "best", "vocab"), [(CPU, "chunk_loss", 4096), (DeviceFacts("gpu", (9, 0)), "triton", 128256)]
)
def test_auto_fuses_large_heads_only(facts, best, vocab):
    def chosen(variant, module=None):
        request = KernelRequest("cross_entropy_loss", variant, facts, torch.float32, module)
        return KERNEL_REGISTRY.resolve(request).chosen

    large, small = (Model(nn.Linear(1, v, bias=False)) for v in (vocab, 32))
    assert chosen("causal") == chosen("causal", large) == chosen("token_log_probs", large) == best
    assert chosen("sequence_classification", large) == best
    assert chosen("sequence_classification") == chosen("causal", small) == "eager"


def test_float64_is_computed_in_float64():
    hidden, weight, labels = inputs(dtype=torch.float64, grad=False)
    with pytest.raises(KernelError, match=r"torch\.float64, not float32"):
        load("triton")(hidden, weight, labels)


@pytest.mark.parametrize("spread", ["every other label", "one label for all", "one token a row"])
def test_strided_labels(name, spread):
    hidden, weight, labels = inputs(rows=(6, 1))
    table = torch.randint(37, (6, 2), device=DEVICE)
    labels = table[:, :1] if spread != "one label for all" else labels.new_tensor([[3]]).expand(6, 1)
    variant = "token_log_probs"
    options = {} if spread == "one token a row" else {"shift_labels": labels}
    found = load(name, variant)(hidden, weight, labels, **options)
    assert_same(found, reference(variant)(hidden, weight, labels, **options))
    if spread != "one token a row":
        flat = labels.squeeze(1)
        variant = "sequence_classification"
        found = gradients(load(name, variant), hidden.squeeze(1), weight, flat)
        assert_same(found, gradients(reference(variant), hidden.squeeze(1), weight, flat))


def test_num_items_tensor_gives_a_scalar_loss(name):
    for function in (load(name), reference()):
        assert function(*inputs(), num_items_in_batch=torch.tensor([5])).shape == ()


@pytest.mark.parametrize("smoothing", [0.5, 1.0])
def test_label_smoothing_gradients_are_accurate(name, smoothing):
    hidden, weight, labels = inputs(rows=(1, 4), width=8, vocab=2000)
    weight = (weight.detach() * 0.1).requires_grad_()
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    options = {"label_smoothing": smoothing}
    fp64 = gradients(reference(), *wide, labels, **options)[2]
    eager = gradients(reference(), hidden, weight, labels, **options)[2]
    found = gradients(load(name), hidden, weight, labels, **options)[2]
    bound = 2 * (eager - fp64).abs().max() + torch.finfo(torch.float32).eps * fp64.abs().max()
    assert (found - fp64).abs().max() <= bound


@pytest.mark.parametrize("sizes", [((3, 11, 33), 131), ((1, 40, 7), 257), ((2, 9, 17), 3)])
def test_smoothed_loss_with_bias_and_odd_sizes(name, sizes):
    """In one draw, the largest error of a gradient may be several times that of eager code, or a part of it."""
    case = _case("smoothed, bias", *sizes, label_smoothing=0.1, bias=True)
    label = CheckResult("cross_entropy_loss", "causal", name, case.name, "bfloat16")
    draws = []
    for seed in range(DRAWS):
        arguments = case.make(torch.bfloat16, torch.device(DEVICE), torch.Generator().manual_seed(seed))
        draws.append(compare(load(name), expect(OP.variant("causal"), arguments, seed), label).comparisons)
    for mean in mean_of(draws):
        assert mean.error <= 2 * mean.eager_error, mean


@pytest.mark.parametrize("bias", [False, True])
def test_vocabulary_in_two_parts(monkeypatch, bias):
    """As on a GPU, where cuBLAS is slow with vocabularies that are not multiples of 8."""
    monkeypatch.setattr(chunked, "_vocabulary_parts", lambda weight: (slice(16, 19), slice(0, 16)))
    torch.manual_seed(0)
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((7, 12), (19, 12), *([(19,)] if bias else []))]
    labels = torch.randint(19, (7,))
    kernel = KERNEL_REGISTRY.load("cross_entropy_loss", "causal", "chunk_loss")
    found = kernel(leaves[0], leaves[1], labels, shift_labels=labels, **({"bias": leaves[2]} if bias else {}))
    wanted = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*leaves), labels)
    torch.testing.assert_close(found, wanted)
    gradients = zip(torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves), strict=True)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in gradients)
