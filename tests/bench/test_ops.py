import collections
import functools
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from opslot import KERNEL_REGISTRY, KernelSpec, bind
from opslot._base.device import CPU
from opslot._base.errors import ConfigError, KernelError
from opslot.bench.baselines import BASELINES, baseline_kernels, check_baselines, load_baselines
from opslot.bench.checks import Check, cannot_run, combine, describe, run_checks
from opslot.bench.ops import bench_ops, call_sites_of
from opslot.bench.result import Distance
from opslot.bench.step import compare_curves
from opslot.bench.step_inputs import text_batch
from opslot.bench.step_process import draw_weights, measure_steps
from opslot.bench.timing import measure
from opslot.bench.tune import timings_of
from opslot.slots import OpSlot, read_profile, write_profile
from opslot.verify.isolated import Lost, Processes
from opslot.verify.parity import CheckResult, compare, expect
from tests.multimodal import TEXT, VISION

STANDARD = KERNEL_REGISTRY.op("rms_norm").variant("standard")
WIDE = (("heads", 1), ("width", 24))


def wrong(hidden_states, weight, eps):
    x = hidden_states.float()
    return (weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * 1.01).to(hidden_states.dtype)


def right(hidden_states, weight, eps):
    return nn.functional.rms_norm(hidden_states, weight.shape, weight, eps)


@pytest.fixture
def kernels():
    """Two kernels of rms_norm/standard, one of them wrong."""
    KERNEL_REGISTRY.register(KernelSpec("wrong", "rms_norm", "standard", lambda: wrong, priority={"cpu": 99}))
    KERNEL_REGISTRY.register(KernelSpec("right", "rms_norm", "standard", lambda: right))
    yield
    KERNEL_REGISTRY.unregister("rms_norm", "standard", "wrong")
    KERNEL_REGISTRY.unregister("rms_norm", "standard", "right")


class Norm(nn.Module):
    rms_norm = OpSlot("rms_norm", "standard")

    def __init__(self, width=24):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


def rows_at(tokens, **options):
    sites = call_sites_of(Norm(), torch.device("cpu"), torch.float32)
    assert [(s.op, s.variant, s.shape) for s in sites] == [("rms_norm", "standard", WIDE)]
    found = bench_ops(["rms_norm"], device="cpu", dtype=torch.float32, call_sites=sites, tokens=tokens, **options)
    return {row.kernel: row for row in found}


def test_modules_of_torch_are_call_sites_where_auto_selects_a_kernel(monkeypatch):
    model = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 40), nn.LayerNorm(40), nn.LayerNorm(24))
    monkeypatch.setattr(KERNEL_REGISTRY, "selected_by_auto", lambda op_name, variant: op_name == "layer_norm")
    sites = call_sites_of(model, torch.device("cpu"), torch.float32)
    assert [(s.op, s.shape) for s in sites] == [("layer_norm", (("width", width),)) for width in (24, 40)]


def test_wrong_kernel_has_no_valid_time_and_is_never_selected(kernels, tmp_path, monkeypatch):
    rows = rows_at(2, compiled=False)
    assert {"eager", "torch_fused", "wrong", "right"} <= set(rows)
    assert rows["wrong"].ms > 0
    assert not rows["wrong"].valid
    assert rows["wrong"].check.startswith("WRONG model width: ")
    assert rows["right"].valid
    assert (rows["right"].origin, rows["torch_fused"].origin) == ("tests", "PyTorch")
    assert rows["eager"].shape == {"width": 24, "heads": 1}
    (timing,) = timings_of(rows.values())
    assert timing.failed == {"wrong": rows["wrong"].check}
    assert set(timing.ms) == {name for name, row in rows.items() if row.valid}

    monkeypatch.setenv("OPSLOT_PROFILE", str(tmp_path / "profile.json"))
    write_profile([replace(timing, ms={**timing.ms, "right": 1e-6})], CPU)
    report = bind(Norm())
    assert report.chosen("rms_norm") == ("right",), "it has no priority, but was measured and checked here"
    assert dict(report.rows[0].rejected)["wrong"] == rows["wrong"].check
    write_profile([timing], CPU)
    fastest = min(timing.ms, key=timing.ms.get)
    assert bind(Norm()).chosen("rms_norm") == (fastest,)
    assert read_profile(CPU).at("rms_norm", "standard", "float32", {"width": 24, "heads": 1}) == timing


def test_kernel_wrong_only_at_the_timed_size_fails():
    def breaks(hidden_states, weight, eps):
        return right(hidden_states, weight, eps) * (1.02 if hidden_states.shape == (70, 24) else 1.0)

    KERNEL_REGISTRY.register(KernelSpec("breaks", "rms_norm", "standard", lambda: breaks))
    try:
        row = rows_at(70, compiled=False)["breaks"]
    finally:
        KERNEL_REGISTRY.unregister("rms_norm", "standard", "breaks")
    assert row.check.startswith("WRONG 70x24: ")


def test_kernel_that_raises_has_a_row_and_others_are_timed():
    def raises(hidden_states, weight, eps):
        raise RuntimeError("no such luck")

    KERNEL_REGISTRY.register(KernelSpec("raises", "rms_norm", "standard", lambda: raises))
    try:
        rows = rows_at(2, compiled=False)
    finally:
        KERNEL_REGISTRY.unregister("rms_norm", "standard", "raises")
    assert rows["raises"].ms is None
    assert "no such luck" in rows["raises"].check
    assert rows["torch_fused"].valid


def check_of(kernel, case=STANDARD.cases[0].name, **fields):
    return Check(
        **{"op": "rms_norm", "variant": "standard", "dtype": torch.float32, "device": "cpu"} | fields,
        kernel=kernel,
        case=case,
    )


@pytest.mark.usefixtures("forked_workers")
def test_checks_in_worker_processes_have_the_same_outcome():
    first, second = (c.name for c in STANDARD.cases[:2])
    checks = [
        check_of("torch_fused", first),
        check_of("torch_fused", second, variant="weight_offset", dtype=torch.bfloat16),
    ]
    with Processes(2) as workers:
        assert run_checks(checks, workers) == dict.fromkeys(checks, "ok")
        # The workers are reused.
        assert run_checks(checks[:1], workers) == {checks[0]: "ok"}


def test_combine_outcomes_of_cases():
    assert combine([]) == "ok"
    assert combine(["ok", "unsupported: powers of two only"]) == "ok"
    assert combine(["unsupported: this", "unsupported: that"]) == "unchecked: this"
    assert combine(["ok", "WRONG first", "unsupported: that", "WRONG second"]) == "WRONG first"
    assert combine(["ok", "unchecked: its check was not done after 60 s"]).startswith("unchecked")


def test_check_that_times_out_or_kills_its_process_reports_it():
    died, late = check_of("fatal"), check_of("slow")

    class Workers:
        def run(self, function, checks, spoils, limit):
            yield died, Lost("exited")
            yield late, Lost(f"was not done after {limit:g} s")

    outcomes = run_checks([died, late], Workers())
    assert outcomes[died] == "WRONG: the process that checked it exited"
    assert outcomes[late] == "unchecked: its check was not done after 180 s"
    assert all(map(cannot_run, outcomes.values()))


def test_large_tensors_are_compared_by_norm():
    variant = KERNEL_REGISTRY.op("rms_norm").variant("standard")
    case = variant.benchmark_case({"width": 512, "heads": 1}, 64)
    expected = expect(variant, case.make(torch.bfloat16, torch.device("cpu"), torch.Generator().manual_seed(0)))
    label = CheckResult("rms_norm", "standard", "k", case.name, "bfloat16")
    assert compare(right, expected, label, by_norm=True).ok
    off = compare(wrong, expected, label, by_norm=True)
    assert not off.ok
    out = next(c for c in off.comparisons if c.name == "out")
    assert out.error == pytest.approx(0.01, rel=0.2), "root mean square of one percent of unit numbers"


@pytest.mark.parametrize(("seconds", "repeats"), [(1e-3, 30), (0.09, 4), (2.0, 3)])
def test_measure_repeats_slow_work_less(monkeypatch, seconds, repeats):
    passed = []
    clock = SimpleNamespace(perf_counter=lambda: seconds * len(passed))
    monkeypatch.setattr("opslot.bench.timing.time", clock)
    assert measure(lambda: passed.append(1), torch.device("cpu")).ms == pytest.approx(1e3 * seconds)
    assert len(passed) == 3 + repeats


def test_measure_returns_elapsed_time(monkeypatch):
    # CPU time of the process, independent of the load of the machine.
    monkeypatch.setattr("opslot.bench.timing.time", SimpleNamespace(perf_counter=time.process_time))
    calls = []

    def quick():
        calls.append(1)
        torch.zeros(1)

    assert measure(quick, torch.device("cpu")).ms < 50
    assert len(calls) == 33


def test_unknown_and_missing_baselines_raise_one_error():
    with pytest.raises(ConfigError) as caught:
        check_baselines(["hf", "unsloth", "veomni"])
    message = str(caught.value)
    assert "unknown baseline 'unsloth'; expected one of hf, liger, quack, veomni" in message
    assert "veomni is not installed; pip install veomni, or name a folder" in message
    check_baselines(["hf", "veomni"], elsewhere=["veomni"])


def test_baseline_that_fails_to_import_raises(monkeypatch):
    monkeypatch.setitem(BASELINES, "quack", replace(BASELINES["quack"], name="no_such_room"))
    with pytest.raises(ConfigError, match="quack is installed but cannot be imported\n  found: ModuleNotFoundError"):
        load_baselines(["quack"])


def test_baseline_that_raises_is_unsupported(monkeypatch):
    def raising(x):
        raise AssertionError("bf16 only")

    class Baseline:
        KERNELS = {("toy", "standard"): {"raising": raising}}  # noqa: RUF012

    monkeypatch.setattr(type(BASELINES["hf"]), "load", lambda self: Baseline)
    kernels = baseline_kernels(["hf"], "toy", "standard")
    assert list(kernels) == ["hf: raising"]
    with pytest.raises(KernelError, match="hf raised AssertionError: bf16 only"):
        kernels["hf: raising"](x=1)
    assert baseline_kernels(["hf"], "toy", "other") == {}


def test_grouped_experts_of_transformers_match_the_reference():
    (kernel,) = baseline_kernels(["hf"], "moe_experts", "standard").values()
    variant = KERNEL_REGISTRY.op("moe_experts").variant("standard")
    case = variant.benchmark_case({"experts": 4, "top_k": 2, "hidden": 32, "intermediate": 16}, 24)
    expected = expect(variant, case.make(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0)))
    assert compare(kernel, expected, CheckResult("moe_experts", "standard", "hf", case.name, "float32")).ok


@pytest.mark.parametrize(
    ("op", "variant"),
    [
        ("chunk_gated_delta_rule", "standard"),
        ("causal_conv1d", "standard"),
        ("mamba_chunk_scan", "standard"),
        ("moe_experts", "biased"),
    ],
)
def test_transformers_own_code_matches_the_reference(op, variant):
    (kernel,) = baseline_kernels(["hf"], op, variant).values()
    spec = KERNEL_REGISTRY.op(op).variant(variant)
    outcomes = []
    for case in (c for c in spec.cases if c.role == "check"):
        expected = expect(spec, case.make(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0)))
        result = compare(kernel, expected, CheckResult(op, variant, "hf", case.name, "float32"), by_norm=True)
        if not result.unsupported:
            outcomes.append((case.name, describe(result)))
    assert outcomes
    assert [outcome for outcome in outcomes if outcome[1] != "ok"] == []


def test_drawn_weights_depend_on_names_alone():
    def model(seed):
        torch.manual_seed(seed)
        return nn.ModuleDict({"norm": nn.LayerNorm(4), "head": nn.Linear(4, 3)})

    # The names of modules around a language model differ by release of Transformers, and by torch.compile.
    first, second = model(0), nn.ModuleDict({"_orig_mod": nn.ModuleDict({"language_model": model(1)})})
    for m in (first, second):
        draw_weights(m, 0.02)
    for (_, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(first["norm"].weight, torch.ones(4))
    assert torch.equal(first["head"].bias, torch.zeros(3))
    assert 0 < first["head"].weight.std() < 0.06


def test_steps_train_on_batches_in_order():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, input_ids, labels, use_cache):
            return type("Output", (), {"loss": (self.weight - input_ids.float().mean()) ** 2})

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    result = measure_steps(model, optimizer, lambda i: text_batch(torch.full((2, 3), i)), 4, torch.device("cpu"))
    assert result["losses"] == [float(i) ** 2 for i in range(7)]
    assert result["tokens_per_s"] == pytest.approx(6 / result["ms"] * 1e3)
    assert result["peak_gib"] is None


def test_compare_curves():
    found = compare_curves([3.0, 2.0, 1.0], [3.0, 2.5, 0.9])
    expected = Distance(largest=0.5, mean=0.2, last=0.1)
    assert vars(found) == pytest.approx(vars(expected))


@pytest.mark.parametrize("calls_before", [0, 1], ids=["in the check at size", "while timed"])
def test_unusable_device_ends_the_run_after_the_row(calls_before):
    calls = []

    def illegal(hidden_states, weight, eps):
        if hidden_states.shape == (2, 24):
            calls.append(1)
            if len(calls) > calls_before:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return right(hidden_states, weight, eps)

    KERNEL_REGISTRY.register(KernelSpec("illegal", "rms_norm", "standard", lambda: illegal))
    sites = call_sites_of(Norm(), torch.device("cpu"), torch.float32)
    found = bench_ops(["rms_norm"], device="cpu", dtype=torch.float32, call_sites=sites, tokens=2, compiled=False)
    rows = []
    try:
        with pytest.raises(KernelError, match="illegal left the device unusable at 2x24"):
            collections.deque(map(rows.append, found))
    finally:
        KERNEL_REGISTRY.unregister("rms_norm", "standard", "illegal")
    assert rows[-1].kernel == "illegal"
    assert "CUDA error" in rows[-1].check
    assert ("eager" in {r.kernel for r in rows}) == bool(calls_before)


def test_baseline_is_checked_on_what_is_timed(monkeypatch):
    class Baseline:
        KERNELS = {  # noqa: RUF012
            ("rms_norm", "standard"): {"good": right, "cheat": wrong, "raising": lambda **arguments: 1 / 0}
        }

    monkeypatch.setattr(type(BASELINES["hf"]), "load", lambda self: Baseline)
    rows = rows_at(70, compiled=False, baselines=["hf"])
    assert rows["hf: good"].valid
    assert rows["hf: cheat"].ms is not None
    assert rows["hf: cheat"].check.startswith("WRONG 70x24: ")
    assert rows["hf: raising"].ms is None
    assert rows["hf: raising"].check == "unsupported: hf raised ZeroDivisionError: division by zero"
    assert not {t for t in timings_of(rows.values())[0].ms if ":" in t}, "no baseline enters a profile"


def test_case_too_large_for_float64_uses_the_small_cases(monkeypatch):
    def no_memory(variant, arguments, seed=0):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("opslot.bench.ops.expect", no_memory)
    # Without the C++ compiler, which takes seconds.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    rows = rows_at(2, compiled=True)
    assert rows["torch_fused"].valid
    assert rows["torch_fused"].check.startswith("ok (on the check cases;")
    assert rows["torch.compile"].check.startswith("unchecked")
    assert not rows["torch.compile"].valid


def test_call_sites_distinguish_head_norms_from_model_norms():
    import opslot

    config = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 99}
    config |= {"num_hidden_layers": 2, "intermediate_size": 48}
    from transformers import Qwen3Config

    model = opslot.build_foundation_model(Qwen3Config(**config), init_device="meta", ops_implementation="eager")
    found = {(s.op, s.variant, s.shape) for s in call_sites_of(model, torch.device("cpu"), torch.float32)}
    heads = (("head_dim", 16), ("heads", 4), ("kv_heads", 2))
    assert found >= {
        ("rms_norm", "standard", (("heads", 4), ("width", 16))),
        ("rms_norm", "standard", (("heads", 1), ("width", 64))),
        ("rotary_pos_emb", "full", heads),
        ("attention", "causal", heads),
        ("swiglu_mlp", "standard", (("width", 48),)),
        ("cross_entropy_loss", "causal", (("hidden", 64), ("vocab", 99))),
    }
    variants = {(op, variant) for op, variant, _ in found}
    for op, variant, shape in found:
        made = KERNEL_REGISTRY.op(op).variant(variant).benchmark_case(dict(shape), 8)
        assert made.role == "bench"
        assert dict(made.shape) == dict(shape), "a case made from a shape has that shape"
    assert len(variants) >= 5


def test_call_sites_are_those_of_kernel_selection_in_a_multimodal_model():
    from transformers import AutoConfig

    import opslot

    config = AutoConfig.for_model("qwen3_vl", text_config=TEXT, vision_config=VISION)
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    model = opslot.build_foundation_model(config, init_device="meta", ops_implementation="eager")
    found = [s for s in call_sites_of(model, torch.device("cpu"), torch.float32) if s.op == "attention"]
    # Those of the encoder and of the language model, which have configs of their own.
    assert {(s.variant, dict(s.shape)["heads"]) for s in found} == {("bidirectional", 2), ("causal", 4)}
