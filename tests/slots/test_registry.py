import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import packaging.requirements
import pytest
import torch

from opslot import KERNEL_REGISTRY, HardwareRequirement, KernelSpec, Requirement
from opslot._base.device import CPU, DeviceFacts
from opslot._base.errors import ConfigError, KernelError
from opslot.slots import KernelRegistry, KernelRequest

H200 = DeviceFacts("gpu", (9, 0), "NVIDIA H200")
ROOT = Path(__file__).parents[2]


def right(x, scale=2.0):
    return x * scale


def test_duplicate_raises_without_replace(toy):
    with pytest.raises(ConfigError, match="registered already"):
        KERNEL_REGISTRY.register(KernelSpec("fast", toy.name, "standard", lambda: right))
    KERNEL_REGISTRY.register(KernelSpec("fast", toy.name, "standard", lambda: right), replace=True)
    assert KERNEL_REGISTRY.load(toy.name, "standard", "fast") is right


@pytest.mark.parametrize(
    "wrong",
    [lambda x: x, lambda y, scale=2.0: y, lambda x, scale=3.0: x, lambda x, *, scale=2.0: x],
    ids=["lacks one", "another name", "another default", "by keyword alone"],
)
def test_signature_must_match_the_contract(toy, wrong):
    with pytest.raises(ConfigError, match=r"the contract is \(x, scale=2.0\)\n  hint: give it the names"):
        KERNEL_REGISTRY.register(KernelSpec("bad", toy.name, "standard", lambda: wrong))
    with pytest.raises(ConfigError, match="no such kernel"):
        KERNEL_REGISTRY.get(toy.name, "standard", "bad")


def test_unusable_kernel_is_checked_when_loaded(toy):
    spec = KernelSpec("elsewhere", toy.name, "standard", lambda: lambda x: x, HardwareRequirement("npu"))
    KERNEL_REGISTRY.register(spec)
    with pytest.raises(ConfigError, match="the contract is"):
        KERNEL_REGISTRY.load(*spec.key)


def test_failing_factory_raises(toy):
    def factory():
        raise ImportError("libfoo.so is missing")

    with pytest.raises(
        KernelError, match=r"kernel 'broken' for toy_double/standard could not be loaded: .*libfoo"
    ) as caught:
        KERNEL_REGISTRY.register(KernelSpec("broken", toy.name, "standard", factory))
    assert "select another kernel, e.g. toy_double_implementation='eager'" in str(caught.value)


def test_kernel_passed_as_factory_raises_with_hint(toy):
    with pytest.raises(KernelError, match=r"(?s)missing 1 required .*pass `lambda: kernel`"):
        KERNEL_REGISTRY.register(KernelSpec("itself", toy.name, "standard", right))
    with pytest.raises(ConfigError, match=r"its factory gave no function\n  found: None\n  hint: return the kernel"):
        KERNEL_REGISTRY.register(KernelSpec("nothing", toy.name, "standard", lambda: None))


def test_registering_a_non_spec_raises(toy):
    with pytest.raises(ConfigError, match="register takes a KernelSpec, got"):
        KERNEL_REGISTRY.register(right)
    with pytest.raises(ConfigError, match="register_op takes an OpSpec, got"):
        KERNEL_REGISTRY.register_op("toy_double")


def test_factory_is_called_once_and_lazily(toy):
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


def test_named_kernel_of_another_variant_raises(toy):
    with pytest.raises(ConfigError, match="serves only the variant other; use one of"):
        KERNEL_REGISTRY.resolve(KernelRequest(toy.name, "standard", CPU), "only_other")


def test_auto_selects_the_highest_usable_priority(toy):
    r = KERNEL_REGISTRY.resolve(KernelRequest(toy.name, "standard", CPU))
    assert r.chosen == "fast"
    assert not r.explicit
    reasons = dict(r.rejected)
    assert "requires an NPU" in reasons["gpu_only"]
    assert "no_such_package_x" in reasons["needs_package"]
    assert "not measured faster" in reasons["unranked"]
    assert reasons["eager"] == "lower priority, 0"


def test_explicit_unusable_kernel_lists_alternatives(toy):
    with pytest.raises(ConfigError) as caught:
        KERNEL_REGISTRY.resolve(KernelRequest(toy.name, "standard", CPU), "needs_package")
    text = str(caught.value)
    assert "requires the package no_such_package_x" in text
    assert "usable here: eager, fast, unranked" in text
    assert "gpu_only: requires an NPU" in text


@pytest.mark.parametrize(
    ("requirement", "device", "reason"),
    [
        (HardwareRequirement("gpu"), H200, None),
        (HardwareRequirement("cuda"), H200, None),
        (HardwareRequirement("gpu", 90), H200, None),
        (HardwareRequirement("gpu", "10.0"), H200, "10.0 or higher"),
        (HardwareRequirement("gpu", None, (8, 9)), H200, "8.9 or lower"),
        (HardwareRequirement("gpu"), CPU, "requires a GPU"),
        (HardwareRequirement("any"), CPU, None),
    ],
)
def test_hardware_requirements(requirement, device, reason):
    found = requirement.unsupported(device)
    assert (found is None) if reason is None else reason in found


def test_invalid_hardware_requirements_raise():
    with pytest.raises(ConfigError, match="unknown device_type 'tpu'"):
        HardwareRequirement("tpu")
    with pytest.raises(ConfigError, match="property of GPUs"):
        HardwareRequirement("cpu", (8, 0))
    with pytest.raises(ConfigError, match="is reserved"):
        KernelSpec("auto", "toy", "standard", lambda: right)
    with pytest.raises(ConfigError, match=r"min_compute_capability 9\.0 is above max_compute_capability 8\.0"):
        HardwareRequirement("gpu", 90, 80)


@pytest.mark.parametrize("capability", [9, 8.9, "sm_90", (9,), (9, "a"), True])
def test_invalid_compute_capability_raises(capability):
    with pytest.raises(ConfigError, match=r"min_compute_capability=.* is not a valid compute capability"):
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
        ("priority", {9: 3}),
        ("requires", None),
        ("requires", (1,)),
        ("requires", ("",)),
        ("dtypes", torch.float32),
        ("dtypes", {"float32"}),
    ],
)
def test_invalid_spec_field_raises(field, value):
    fields = {"factory": lambda: right, field: value}
    with pytest.raises(ConfigError, match=rf"toy/standard mine: KernelSpec\.{field} must be .*, got "):
        KernelSpec("mine", "toy", "standard", **fields)


def test_dtype_and_supports_are_checked_after_hardware(toy):
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
    ("supports", "expected_message"),
    [
        (lambda request: 1 / 0, r"supports\(\) raised ZeroDivisionError"),
        (lambda request: True, r"supports\(\) returned True; it must return None"),
        (lambda request: False, r"supports\(\) returned False; it must return None"),
    ],
    ids=["raises", "True", "False"],
)
def test_invalid_supports_makes_only_its_kernel_unsupported(toy, supports, expected_message):
    KERNEL_REGISTRY.register(KernelSpec("odd", toy.name, "standard", lambda: right, supports=supports, priority=99))
    found = KERNEL_REGISTRY.resolve(KernelRequest(toy.name, "standard", CPU))
    assert found.chosen == "fast"
    with pytest.raises(ConfigError, match=expected_message):
        KERNEL_REGISTRY.resolve(KernelRequest(toy.name, "standard", CPU), "odd")


@pytest.mark.parametrize(
    ("priority", "expected_message"),
    [
        (lambda request: 1 / 0, "priority() raised ZeroDivisionError"),
        (lambda request: "high", "priority() raised TypeError: it returned 'high', expected a number or None"),
        (lambda request: {"cpu": 99}, "it returned {'cpu': 99}, expected a number or None"),
    ],
    ids=["raises", "text", "mapping"],
)
def test_invalid_priority_is_a_reason(toy, priority, expected_message):
    KERNEL_REGISTRY.register(KernelSpec("odd", toy.name, "standard", lambda: right, priority=priority))
    found = KERNEL_REGISTRY.resolve(KernelRequest(toy.name, "standard", CPU))
    assert found.chosen == "fast"
    assert expected_message in dict(found.rejected)["odd"]


def test_cuda_priority_applies_to_gpus(toy):
    spec = KernelSpec("mine", toy.name, "standard", lambda: right, priority={"cuda": 7})
    assert spec.priority_for(KernelRequest(toy.name, "standard", H200)).value == 7


def test_priority_may_depend_on_the_request(toy):
    spec = KernelSpec(
        "wide", toy.name, "standard", lambda: right, priority=lambda r: 50 if r.dtype == torch.float16 else None
    )
    KERNEL_REGISTRY.register(spec)
    assert KERNEL_REGISTRY.resolve(KernelRequest(toy.name, "standard", CPU, torch.float16)).chosen == "wide"
    assert KERNEL_REGISTRY.resolve(KernelRequest(toy.name, "standard", CPU, torch.float32)).chosen == "fast"


A100, L40S, B200 = (
    DeviceFacts("gpu", capability, name)
    for capability, name in [((8, 0), "NVIDIA A100"), ((8, 9), "NVIDIA L40S"), ((10, 0), "NVIDIA B200")]
)


@pytest.fixture
def measured(toy):
    """The toy op with kernels measured on an H200: two portable ones, and a faster one tuned for its architecture."""
    for name, priority, portable in [("slow", 60, True), ("good", 80, True), ("tuned", 90, False)]:
        hardware = HardwareRequirement("gpu", (8, 0))
        KERNEL_REGISTRY.register(
            KernelSpec(
                name, toy.name, "standard", lambda: right, hardware, priority={(9, 0): priority}, portable=portable
            )
        )
    KERNEL_REGISTRY.unregister(toy.name, "standard", "fast")
    return toy


def test_priority_of_a_measured_gpu_names_it(measured):
    found = KERNEL_REGISTRY.resolve(KernelRequest(measured.name, "standard", H200))
    assert (found.chosen, found.why) == ("tuned", "fastest measured on NVIDIA H200 (sm_90), priority 90")
    reasons = dict(found.rejected)
    assert reasons["good"] == "slower on NVIDIA H200 (sm_90), priority 80"
    assert reasons["eager"] == "slower on NVIDIA H200 (sm_90), priority 0"
    assert reasons["unranked"] == "usable, but not measured faster than eager on sm_90"


@pytest.mark.parametrize(("device", "name"), [(A100, "sm_80"), (L40S, "sm_89"), (B200, "sm_100")])
def test_unmeasured_gpu_uses_portable_kernels(measured, device, name):
    found = KERNEL_REGISTRY.resolve(KernelRequest(measured.name, "standard", device))
    assert found.chosen == "good"
    assert found.why == (
        f"highest priority, 80; not measured on {name}, ordered as measured on NVIDIA H200 (sm_90); "
        "run `opslot bench --tune` to measure this GPU"
    )
    reasons = dict(found.rejected)
    assert reasons["slow"] == "lower priority, 60, measured on NVIDIA H200 (sm_90)"
    assert reasons["tuned"] == (
        "usable, but measured on NVIDIA H200 (sm_90) only; name it, or run `opslot bench --tune`"
    )
    assert KERNEL_REGISTRY.resolve(KernelRequest(measured.name, "standard", device), "tuned").chosen == "tuned"


def test_gpu_priorities_do_not_apply_on_cpu(measured):
    found = KERNEL_REGISTRY.resolve(KernelRequest(measured.name, "standard", CPU))
    assert (found.chosen, found.why) == ("eager", "no usable kernel was measured faster than eager on CPU")


def test_priority_measured_on_cpu_is_explained(measured):
    spec = KernelSpec("host", measured.name, "standard", lambda: right, priority={"cpu": 60})
    KERNEL_REGISTRY.register(spec)
    found = KERNEL_REGISTRY.resolve(KernelRequest(measured.name, "standard", CPU))
    assert (found.chosen, found.why) == ("host", "fastest measured on CPU, priority 60")
    assert dict(found.rejected)["eager"] == "slower on CPU, priority 0"
    assert spec.priority_for(KernelRequest(measured.name, "standard", H200)) is None


def test_priority_measured_on_this_gpu_has_precedence(measured):
    spec = KernelSpec("here", measured.name, "standard", lambda: right, priority={"8.0": 10}, portable=True)
    KERNEL_REGISTRY.register(spec)
    found = KERNEL_REGISTRY.resolve(KernelRequest(measured.name, "standard", A100))
    assert (found.chosen, found.why) == ("here", "fastest measured on sm_80, priority 10")


def test_nearest_measured_gpu_decides():
    spec = KernelSpec("mine", "toy", "standard", lambda: right, priority={80: 1, 90: 2, 120: 3}, portable=True)
    found = [spec.priority_for(KernelRequest("toy", "standard", gpu)) for gpu in (A100, L40S, B200)]
    h200 = "NVIDIA H200 (sm_90)"
    assert [(p.value, p.measured_on) for p in found] == [(1, "sm_80"), (2, h200), (2, h200)]


def test_builtin_triton_kernels_are_selected_on_every_gpu(monkeypatch):
    monkeypatch.setattr("opslot.slots.spec.has_package", lambda name: True)
    monkeypatch.setattr("opslot.slots.spec.package_version", lambda name: None)
    chosen = {}
    for device in (A100, L40S, H200, B200):
        for op, variant in [("rms_norm", "standard"), ("attention", "causal"), ("moe_experts", "standard")]:
            request = KernelRequest(op, variant, device, torch.bfloat16)
            chosen[op, device.capability] = KERNEL_REGISTRY.resolve(request).chosen
    assert {chosen["rms_norm", gpu.capability] for gpu in (A100, L40S, H200, B200)} == {"triton_or_torch"}
    assert chosen["attention", (9, 0)] == "flash_attention_4"
    assert {chosen["attention", gpu.capability] for gpu in (A100, L40S, B200)} == {"sdpa"}
    assert chosen["moe_experts", (9, 0)] == "fused_quack"
    assert {chosen["moe_experts", gpu.capability] for gpu in (A100, L40S, B200)} == {"fused_triton"}


@pytest.mark.parametrize(
    ("requirement", "present", "version", "reason"),
    [
        (Requirement("quack", "quack-kernels", ">=0.5"), True, "0.4.1", "requires quack-kernels>=0.5, found 0.4.1"),
        (Requirement("quack", "quack-kernels", ">=0.5"), True, "0.5.0", None),
        (Requirement("quack", "quack-kernels", ">=0.5"), True, "0.6.0.dev3+gitabc", None),
        (Requirement("quack", "quack-kernels", ">=0.5"), False, None, "requires quack-kernels>=0.5, not installed"),
        (Requirement("quack", "quack-kernels"), True, "0.1", None),
        (Requirement("quack", "quack-kernels"), False, None, "requires the package quack, not installed"),
        (Requirement("triton", version=">=3.4"), True, None, None),
        (Requirement("triton", version=">=3.4"), True, "3.3.1", "requires triton>=3.4, found 3.3.1"),
    ],
)
def test_requirement_checks_module_and_version(monkeypatch, requirement, present, version, reason):
    monkeypatch.setattr("opslot.slots.spec.has_package", lambda name: present)
    monkeypatch.setattr("opslot.slots.spec.package_version", lambda name: version)
    assert requirement.unsupported() == reason
    spec = KernelSpec("mine", "toy", "standard", lambda: right, requires=requirement)
    assert spec.unsupported(KernelRequest("toy", "standard", CPU)) == reason


def test_string_requires_a_module_of_any_version():
    spec = KernelSpec("mine", "toy", "standard", lambda: right, requires=("torch", "yaml"))
    assert spec.requires == (Requirement("torch", "torch", ""), Requirement("yaml", "yaml", ""))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"module": ""}, "Requirement.module must be the name of a package"),
        ({"module": "quack", "version": "0.5"}, "Requirement.version must be a version specifier, .* got '0.5'"),
        ({"module": "quack", "version": 0.5}, "Requirement.version must be a string, got 0.5"),
    ],
)
def test_invalid_requirement_raises(fields, message):
    with pytest.raises(ConfigError, match=message):
        Requirement(**fields)


def test_extras_state_the_versions_that_kernels_require():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    stated = {packaging.requirements.Requirement(line).name: line for lines in extras.values() for line in lines}
    required = {r for spec in KERNEL_REGISTRY.specs() for r in spec.requires if r.version}
    lowest = {r.distribution: min(x.version for x in required if x.distribution == r.distribution) for r in required}
    assert lowest == {
        "triton": ">=3.4",
        "liger-kernel": ">=0.8",
        "quack-kernels": ">=0.5",
        "fla-core": ">=0.6",
        "flash-qla": ">=0.1.3",
    }
    for distribution, version in lowest.items():
        assert stated[distribution].partition(";")[0] == f"{distribution}{version}"


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
    assert [r.getMessage().partition("failed: ")[2].partition(" KernelSpec(")[0] for r in caplog.records] == [
        "ImportError: gone",
        "SystemExit: no GPU",
        "TypeError: expected a function or a module, found",
        "TypeError: unsupported operand type(s) for *: 'KernelRegistry' and 'float'",
    ]


def test_ops_that_are_imported_first_load_no_entry_points(toy, monkeypatch):
    """`import opslot.ops` before the registry is used: entry points need all ops, not those so far."""
    loaded = []
    point = SimpleNamespace(value="a:b", load=lambda: lambda registry: loaded.append([*registry.ops]))
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
    registry = KernelRegistry(entry_points=True)
    registry.register_op(toy)
    registry.register(KernelSpec("fast", toy.name, "standard", "math:sqrt"))
    registry.register_op(replace(toy, name="other"))
    assert loaded == []
    assert len(registry.specs()) == 1
    assert loaded == [[toy.name, "other"]]


def test_variants_must_be_a_mapping(toy):
    with pytest.raises(ConfigError, match="variants must be a mapping by name\n  found: tuple"):
        replace(toy, variants=tuple(toy.variants.values()))


def test_unknown_op_raises_with_a_suggestion(toy):
    with pytest.raises(ConfigError, match="did you mean 'toy_double'"):
        KERNEL_REGISTRY.op("toy_doubel")


def test_unregister_discovers_kernels_first():
    registry = KernelRegistry(["opslot.ops.swiglu_mlp"])
    # The module registers into KERNEL_REGISTRY, so this registry has no such op, but it must import its sources first.
    with pytest.raises(ConfigError, match="unknown op 'swiglu'"):
        registry.unregister("swiglu", "standard", "triton")
    assert not registry._pending


def test_unregistering_an_unknown_kernel_raises(toy):
    with pytest.raises(ConfigError, match="no such kernel"):
        KERNEL_REGISTRY.unregister(toy.name, "standard", "missing")
