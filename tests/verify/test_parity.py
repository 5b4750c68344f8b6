"""The parity harness fails wrong kernels and passes correct ones."""

import re

import pytest
import torch
from torch.utils._pytree import tree_map

from opslot import KERNEL_REGISTRY
from opslot._base.errors import ConfigError, KernelError
from opslot.slots import InputCase, OpVariant
from opslot.slots.random_inputs import randn
from opslot.verify import CheckResult, check_kernel, poisoned_memory, verify_kernels
from opslot.verify.isolated import Lost, Processes
from opslot.verify.parity import DRAWS, Comparison, compare, expect, mean_of

VARIANT = KERNEL_REGISTRY.op("rms_norm").variant("standard")
CASE = next(c for c in VARIANT.cases if c.role == "check")


def right(hidden_states, weight, eps):
    return VARIANT.reference(hidden_states, weight, eps)


def check(kernel, dtype=torch.float32):
    return check_kernel(kernel, "rms_norm", VARIANT, CASE, dtype)


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.001


def uninitialized(hidden_states, weight, eps):
    out = torch.empty_like(hidden_states)
    out[:-1] = right(hidden_states, weight, eps)[:-1]
    return out


def wrong_gradient(hidden_states, weight, eps):
    return right(_WrongBackward.apply(hidden_states), weight, eps)


WRONG = {
    "a percent off": lambda x, w, e: right(x, w, e) * 1.01,
    "another eps": lambda x, w, e: right(x, w, 1e-3),
    "no weight gradient": lambda x, w, e: right(x, w.detach(), e),
    "a gradient 0.1% off": wrong_gradient,
    "an element never written": uninitialized,
    "nan": lambda x, w, e: right(x, w, e) * float("nan"),
    "offset form": lambda x, w, e: right(x, w, e) + right(x, torch.ones_like(w), e),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernel_fails(name):
    kernel = WRONG[name]

    def named(hidden_states, weight, eps):
        return kernel(hidden_states, weight, eps)

    result = check(named)
    assert not result.ok
    assert "failed" in str(result)


def first_cases():
    for op in KERNEL_REGISTRY.ops.values():
        for variant in op.variants.values():
            yield pytest.param(op.name, variant, id=f"{op.name}-{variant.name}")


def mapped(function, values):
    return tree_map(lambda x: function(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, values)


MUTATIONS = {
    "bf16 inside": lambda reference: (
        lambda **call: mapped(torch.Tensor.float, reference(**mapped(lambda x: x.bfloat16(), call)))
    ),
    "a term of 1e-3 missing": lambda reference: lambda **call: mapped(lambda x: x * (1 - 1e-3), reference(**call)),
}


@pytest.mark.quick(
    "*-standard-a term of 1e-3 missing",
    "attention-causal-*",
    "rms_norm-*",
    "moe_experts-standard-*",
    "cross_entropy_loss-causal-*",
    "swiglu_mlp-*",
    "rotary_pos_emb-full-*",
)
@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize(("op", "variant"), first_cases())
def test_wrong_code_fails_for_every_op(op, variant, mutation):
    case = next(c for c in variant.cases if c.role == "check")
    wrong = MUTATIONS[mutation](variant.reference)
    result = check_kernel(wrong, op, variant, case, torch.float32)
    assert not result.ok, str(result)


def one_token_later(reference):
    """A causal mask that lets each token see the next one."""

    def wrong(query, key, value, **call):
        key, value = (torch.cat([x[..., 1:, :], x[..., :1, :]], -2) for x in (key, value))
        return reference(query, key, value, **call)

    return wrong


def one_label_ignored(reference):
    def wrong(hidden_states, weight, labels, **call):
        labels = labels.clone()
        labels[tuple((labels[:, 1:] != -100).nonzero()[0] + torch.tensor([0, 1]))] = -100
        return reference(hidden_states, weight, labels, **call)

    return wrong


def last_pair_dropped(reference):
    def wrong(top_k_weights, **call):
        kept = torch.ones_like(top_k_weights)
        kept[-1, -1] = 0
        return reference(top_k_weights=top_k_weights * kept, **call)

    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("op", "variant", "mutate"),
    [
        ("attention", "causal", one_token_later),
        ("cross_entropy_loss", "causal", one_label_ignored),
        ("moe_experts", "standard", last_pair_dropped),
    ],
)
def test_wrong_mask_fails(op, variant, mutate, dtype):
    variant = KERNEL_REGISTRY.op(op).variant(variant)
    case = next(c for c in variant.cases if c.role == "check")
    assert check_kernel(variant.reference, op, variant, case, dtype).ok
    assert not check_kernel(mutate(variant.reference), op, variant, case, dtype).ok


def summed(x):
    return sum(x[1:], x[0])


def summed_from_the_end(x):
    return sum(x.flip(0)[1:], x[-1])


def test_another_summation_order_passes_for_every_seed():
    case = InputCase("one", lambda dtype, device, generator: {"x": randn((64, 4), dtype, device, generator) * 100})
    variant = OpVariant("sum", summed, [case], ("x",))
    results = [check_kernel(summed_from_the_end, "sums", variant, case, torch.float32, seed=s) for s in range(40)]
    assert [str(r) for r in results if not r.ok] == []
    assert {r.draws for r in results} == {1, DRAWS}
    assert f"(mean of {DRAWS} draws)" in str(next(r for r in results if r.draws > 1))


def test_draws_without_a_gradient_are_left_out_of_its_mean():
    out, grad = Comparison("out", 1.0, 2.0, 4.0), Comparison("grad x", 3.0, 1.0, 2.0)
    doubled = Comparison("out", 2.0, 4.0, 8.0)
    assert mean_of([(out, grad), (doubled,)]) == (Comparison("out", 1.5, 3.0, 6.0), grad)


def test_nine_times_the_error_of_eager_fails_for_every_seed():
    """The sums are so long that eager's error is larger than the eps tolerance."""

    def wrong(x):
        out = summed(x)
        return out + 8 * (summed(x.detach()) - summed(x.detach().double())).to(out)

    case = InputCase("one", lambda dtype, device, generator: {"x": randn((256, 4), dtype, device, generator)})
    variant = OpVariant("sum", summed, [case], ("x",))
    for seed in range(10):
        result = check_kernel(wrong, "sums", variant, case, torch.float32, seed=seed)
        assert not result.ok
        assert result.draws == DRAWS


@pytest.mark.parametrize("by_norm", [False, True])
def test_nans_must_be_where_the_reference_has_them(by_norm):
    variant = KERNEL_REGISTRY.op("cross_entropy_loss").variant("causal")
    labels = torch.full((1, 3), -100)
    expected = expect(variant, {"hidden_states": torch.randn(1, 3, 8), "weight": torch.randn(5, 8), "labels": labels})
    label = CheckResult("cross_entropy_loss", "causal", "kernel", "no labels", "float32")
    assert expected.fp64["out"].isnan()

    def check(kernel):
        return compare(kernel, expected, label, by_norm=by_norm)

    assert check(KERNEL_REGISTRY.load("cross_entropy_loss", "causal", "chunk_loss")).ok
    assert not check(lambda *args, **kwargs: variant.reference(*args, **kwargs).nan_to_num(0.0)).ok
    assert not check(lambda hidden_states, **kwargs: variant.reference(hidden_states * float("nan"), **kwargs)).ok


def test_reference_itself_passes():
    result = check(right)
    assert result.ok
    assert {c.name for c in result.comparisons} == {"out", "grad hidden_states", "grad weight"}


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (lambda hidden_states, weight, eps: right(hidden_states, weight, eps)[0], "shape"),
        (lambda hidden_states, weight, eps: right(hidden_states, weight, eps).double(), "dtype"),
        (lambda hidden_states, weight, eps: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_results_that_cannot_be_compared_fail(kernel, message):
    result = check(kernel)
    assert not result.ok
    assert message in str(result)


def test_unsupported_case_is_neither_failed_nor_passed():
    def unsupported(hidden_states, weight, eps):
        raise KernelError("serves powers of two")

    result = check(unsupported)
    assert result.ok
    assert result.unsupported == "serves powers of two"
    assert not result.comparisons


def test_inputs_are_reproducible():
    first = CASE.make(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
    again = CASE.make(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
    assert torch.equal(first["hidden_states"], again["hidden_states"])


def test_poisoned_memory_ends_with_the_block():
    with poisoned_memory():
        assert torch.empty(3).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("op", "kernel", "message"),
    [
        ("nope", None, "unknown op 'nope'\n  hint: there are"),
        (None, "tritn", "hint: did you mean 'triton'?"),
        (["adamw"], "nope", "unknown kernel 'nope' for 'adamw'\n  found: registered: triton"),
    ],
)
def test_unknown_op_or_kernel_raises_at_the_call(op, kernel, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        verify_kernels(op, kernel)


@pytest.mark.usefixtures("forked_workers")
def test_workers_give_the_same_results():
    alone = list(verify_kernels("rms_norm", "torch_fused", device="cpu", dtypes=(torch.float32, torch.bfloat16)))
    shared = list(
        verify_kernels("rms_norm", "torch_fused", device="cpu", dtypes=(torch.float32, torch.bfloat16), workers=1)
    )
    assert shared == alone
    assert len(alone) > 20


def test_worker_that_exits_is_a_failed_check(monkeypatch):
    def run(self, function, checks, spoils):
        # Results are not in the requested order.
        for check in checks[:0:-1]:
            yield check, function(check)
        yield checks[0], Lost("exited")

    monkeypatch.setattr(Processes, "run", run)
    first, *rest = verify_kernels("rms_norm", "torch_fused", device="cpu", dtypes=(torch.float32,), workers=2)
    assert not first.ok
    assert f"rms_norm/standard torch_fused [{CASE.name}, float32]: failed, its process exited" in str(first)
    assert rest == list(verify_kernels("rms_norm", "torch_fused", device="cpu", dtypes=(torch.float32,)))[1:]


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, of_statistics, grad):
        return grad * 3


def test_outputs_without_gradient_do_not_change_gradients():
    """A kernel may return statistics without marking them as not differentiable."""
    case = InputCase("one", lambda dtype, device, generator: {"x": randn((4, 8), dtype, device, generator)})
    variant = OpVariant("pair", lambda x: (x.detach() * 2, x * 3), [case], ("x",))
    found = check_kernel(lambda x: _Pair.apply(x), "pairs", variant, case, torch.float32)
    assert found.ok, str(found)


@pytest.mark.parametrize("by_norm", [False, True])
def test_infinities_must_be_where_the_reference_has_them(by_norm):
    variant = KERNEL_REGISTRY.op("indexer_scores").variant("standard")
    arguments = variant.case("causal").make(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
    expected = expect(variant, arguments)
    assert expected.fp64["out"].isinf().any()
    label = CheckResult("indexer_scores", "standard", "mine", "causal", "float32")

    def check(kernel):
        return compare(kernel, expected, label, by_norm=by_norm)

    assert check(variant.reference).ok
    assert not check(lambda *args, **kwargs: variant.reference(*args, **{**kwargs, "visible": None})).ok
    assert not check(lambda *args, **kwargs: variant.reference(*args, **kwargs) * 1.001).ok
