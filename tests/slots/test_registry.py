import sys

import pytest
import torch

from opslot import KERNEL_REGISTRY, HardwareRequirement, KernelSpec
from opslot._base.device import CPU, DeviceFacts
from opslot._base.errors import ConfigError, KernelError
from opslot.slots import KernelRegistry, KernelRequest

H200 = DeviceFacts("gpu", (9, 0), "NVIDIA H200")


def right(x, scale=2.0):
    return x * scale


def test_duplicate_is_refused_and_replace_replaces(toy):
    with pytest.raises(ConfigError, match="registered already"):
        KERNEL_REGISTRY.register(KernelSpec("fast", toy.name, "standard", lambda: right))
    KERNEL_REGISTRY.register(KernelSpec("fast", toy.name, "standard", lambda: right), replace=True)
    assert KERNEL_REGISTRY.load(toy.name, "standard", "fast") is right


@pytest.mark.parametrize(
    "wrong",
    [lambda x: x, lambda y, scale=2.0: y, lambda x, scale=3.0: x, lambda x, *, scale=2.0: x],
    ids=["lacks one", "another name", "another default", "by keyword alone"],
)
def test_signature_must_equal_the_contract(toy, wrong):
    with pytest.raises(ConfigError, match=r"the contract is \(x, scale=2.0\)"):
        KERNEL_REGISTRY.register(KernelSpec("bad", toy.name, "standard", lambda: wrong))
    with pytest.raises(ConfigError, match="no such kernel"):
        KERNEL_REGISTRY.get(toy.name, "standard", "bad")


def test_a_kernel_that_cannot_run_here_is_checked_when_loaded(toy):
    spec = KernelSpec("elsewhere", toy.name, "standard", lambda: lambda x: x, HardwareRequirement("npu"))
    KERNEL_REGISTRY.register(spec)
    with pytest.raises(ConfigError, match="the contract is"):
        KERNEL_REGISTRY.load(*spec.key)


def test_a_failing_factory_is_one_clear_error(toy):
    def factory():
        raise ImportError("libfoo.so is missing")

    with pytest.raises(
        KernelError, match=r"kernel 'broken' for toy_double/standard could not be loaded: .*libfoo"
    ) as told:
        KERNEL_REGISTRY.register(KernelSpec("broken", toy.name, "standard", factory))
    assert "select another kernel, e.g. toy_double_implementation='eager'" in str(told.value)


def test_a_kernel_given_for_its_factory_says_what_to_pass(toy):
    with pytest.raises(KernelError, match=r"(?s)missing 1 required .*pass `lambda: kernel`"):
        KERNEL_REGISTRY.register(KernelSpec("itself", toy.name, "standard", right))
    with pytest.raises(ConfigError, match=r"its factory gave None; it must return the kernel"):
        KERNEL_REGISTRY.register(KernelSpec("nothing", toy.name, "standard", lambda: None))


def test_what_is_no_spec_is_refused(toy):
    with pytest.raises(ConfigError, match="register takes a KernelSpec, got"):
        KERNEL_REGISTRY.register(right)
    with pytest.raises(ConfigError, match="register_op takes an OpSpec, got"):
        KERNEL_REGISTRY.register_op("toy_double")


def test_factory_is_called_once_and_late(toy):
    calls = []

    def factory():
        calls.append(1)
        return right

    registry = KernelRegistry()
    registry.register_op(toy)
    registry.register(KernelSpec("lazy", toy.name, "standard", factory, HardwareRequirement("npu")))
    assert not calls
    registry.load(toy.name, "standard", "lazy")
    registry.load(toy.name, "standard", "lazy")
    assert len(calls) == 1


def test_named_kernel_of_another_variant_says_which(toy):
    with pytest.raises(ConfigError, match="serves only the variant other; use one of"):
        KERNEL_REGISTRY.resolve(KernelRequest(toy.name, "standard", CPU), "only_other")


def test_auto_takes_the_highest_usable_rank_and_says_why_not_the_others(toy):
    r = KERNEL_REGISTRY.resolve(KernelRequest(toy.name, "standard", CPU))
    assert r.chosen == "fast"
    assert not r.explicit
    reasons = dict(r.rejected)
    assert "needs an NPU" in reasons["gpu_only"]
    assert "no_such_package_x" in reasons["needs_package"]
    assert "not measured faster" in reasons["unranked"]
    assert "slower" in reasons["eager"]


def test_explicit_unusable_kernel_lists_alternatives(toy):
    with pytest.raises(ConfigError) as caught:
        KERNEL_REGISTRY.resolve(KernelRequest(toy.name, "standard", CPU), "needs_package")
    text = str(caught.value)
    assert "needs the package no_such_package_x" in text
    assert "usable here: eager, fast, unranked" in text
    assert "gpu_only: needs an NPU" in text


@pytest.mark.parametrize(
    ("requirement", "device", "reason"),
    [
        (HardwareRequirement("gpu"), H200, None),
        (HardwareRequirement("cuda"), H200, None),
        (HardwareRequirement("gpu", 90), H200, None),
        (HardwareRequirement("gpu", "10.0"), H200, "10.0 or higher"),
        (HardwareRequirement("gpu", None, (8, 9)), H200, "8.9 or lower"),
        (HardwareRequirement("gpu"), CPU, "needs a GPU"),
        (HardwareRequirement("any"), CPU, None),
    ],
)
def test_hardware(requirement, device, reason):
    found = requirement.unsupported(device)
    assert (found is None) if reason is None else reason in found


def test_bad_requirements_are_refused():
    with pytest.raises(ConfigError, match="use one of"):
        HardwareRequirement("tpu")
    with pytest.raises(ConfigError, match="property of GPUs"):
        HardwareRequirement("cpu", (8, 0))
    with pytest.raises(ConfigError, match="own choice"):
        KernelSpec("auto", "toy", "standard", lambda: right)
    with pytest.raises(ConfigError, match=r"min_compute_capability 9\.0 is above max_compute_capability 8\.0"):
        HardwareRequirement("gpu", 90, 80)


@pytest.mark.parametrize("capability", [9, 8.9, "sm_90", (9,), (9, "a"), True])
def test_a_capability_that_is_none_is_refused(capability):
    with pytest.raises(ConfigError, match=r"min_compute_capability=.* is no compute capability"):
        HardwareRequirement("gpu", capability)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("factory", None),
        ("factory", "package.module"),
        ("hardware", "gpu"),
        ("supports", "float32"),
        ("priority", "high"),
        ("priority", {"gpu": "high"}),
        ("priority", {"tpu": 3}),
        ("requires", None),
        ("requires", (1,)),
        ("dtypes", torch.float32),
        ("dtypes", {"float32"}),
    ],
)
def test_a_field_that_would_fail_in_somebody_elses_model_is_refused_at_once(field, value):
    fields = {"factory": lambda: right, field: value}
    with pytest.raises(ConfigError, match=rf"toy/standard mine: KernelSpec\.{field} must be .*, got "):
        KernelSpec("mine", "toy", "standard", **fields)


def test_dtype_and_supports_come_after_hardware(toy):
    spec = KernelSpec(
        "half",
        toy.name,
        "standard",
        lambda: right,
        dtypes=frozenset({torch.bfloat16}),
        supports=lambda request: "never",
    )
    assert "takes bfloat16, not float32" in spec.unsupported(KernelRequest(toy.name, "standard", CPU, torch.float32))
    assert spec.unsupported(KernelRequest(toy.name, "standard", CPU, torch.bfloat16)) == "never"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (lambda request: 1 / 0, r"supports\(\) raised ZeroDivisionError"),
        (lambda request: True, r"supports\(\) returned True, where None means"),
        (lambda request: False, r"supports\(\) returned False, where None means"),
    ],
    ids=["raises", "True", "False"],
)
def test_supports_that_answers_otherwise_is_the_reason_and_keeps_no_other_kernel_from_use(toy, told, said):
    KERNEL_REGISTRY.register(KernelSpec("odd", toy.name, "standard", lambda: right, supports=told, priority=99))
    found = KERNEL_REGISTRY.resolve(KernelRequest(toy.name, "standard", CPU))
    assert found.chosen == "fast"
    with pytest.raises(ConfigError, match=said):
        KERNEL_REGISTRY.resolve(KernelRequest(toy.name, "standard", CPU), "odd")


@pytest.mark.parametrize(
    ("priority", "said"),
    [
        (lambda request: 1 / 0, "priority() raised ZeroDivisionError"),
        (lambda request: "high", "priority() raised TypeError: it returned 'high', neither a number nor None"),
        (lambda request: {"cpu": 99}, "it returned {'cpu': 99}, neither a number nor None"),
    ],
    ids=["raises", "text", "mapping"],
)
def test_a_priority_that_gives_no_number_is_a_reason(toy, priority, said):
    KERNEL_REGISTRY.register(KernelSpec("odd", toy.name, "standard", lambda: right, priority=priority))
    found = KERNEL_REGISTRY.resolve(KernelRequest(toy.name, "standard", CPU))
    assert found.chosen == "fast"
    assert said in dict(found.rejected)["odd"]


def test_cuda_in_a_priority_is_a_gpu(toy):
    spec = KernelSpec("mine", toy.name, "standard", lambda: right, priority={"cuda": 7})
    assert spec.priority_for(KernelRequest(toy.name, "standard", H200)) == 7


def test_priority_may_depend_on_the_request(toy):
    spec = KernelSpec(
        "wide", toy.name, "standard", lambda: right, priority=lambda r: 50 if r.dtype == torch.float16 else None
    )
    KERNEL_REGISTRY.register(spec)
    assert KERNEL_REGISTRY.resolve(KernelRequest(toy.name, "standard", CPU, torch.float16)).chosen == "wide"
    assert KERNEL_REGISTRY.resolve(KernelRequest(toy.name, "standard", CPU, torch.float32)).chosen == "fast"


def test_entry_points_register_and_a_broken_one_only_warns(toy, monkeypatch, caplog):
    class Point:
        def __init__(self, value, load):
            self.value, self.load = value, load

    def plugin(registry):
        registry.register_op(toy)
        registry.register(KernelSpec("theirs", toy.name, "standard", lambda: right))

    def broken():
        raise ImportError("gone")

    odd = KernelSpec("lost", toy.name, "standard", lambda: right)
    points = [
        Point("a:b", lambda: plugin),
        Point("c:d", broken),
        Point("e:f", lambda: sys.exit("no GPU")),
        Point("g:h", lambda: odd),
        Point("i:j", lambda: right),
        Point("sys", lambda: sys),
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points if group == "opslot.kernels" else [])
    registry = KernelRegistry(entry_points=True)
    assert [s.name for s in registry.specs(toy.name)] == ["theirs"]
    assert [r.getMessage().partition("left out: ")[2].partition(" KernelSpec(")[0] for r in caplog.records] == [
        "ImportError: gone",
        "SystemExit: no GPU",
        "TypeError: it is",
        "TypeError: unsupported operand type(s) for *: 'KernelRegistry' and 'float'",
    ]


def test_unknown_op_suggests(toy):
    with pytest.raises(ConfigError, match="did you mean 'toy_double'"):
        KERNEL_REGISTRY.op("toy_doubel")


def test_a_kernel_is_gone_even_where_it_was_not_looked_for_yet():
    registry = KernelRegistry(["opslot.ops.swiglu_mlp"])
    # What the module registers goes to the one registry; a source of its own is what this one looks into first.
    with pytest.raises(ConfigError, match="unknown op 'swiglu'"):
        registry.unregister("swiglu", "standard", "triton")
    assert not registry._pending


def test_a_kernel_that_does_not_exist_cannot_be_removed(toy):
    with pytest.raises(ConfigError, match="no such kernel"):
        KERNEL_REGISTRY.unregister(toy.name, "standard", "nobody")
