import collections
import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from opslot import KERNEL_REGISTRY, KernelSpec, bind
from opslot._base.device import CPU
from opslot._base.errors import ConfigError, KernelError
from opslot.bench import (
    BenchRow,
    as_dict,
    bench,
    compare_curves,
    draw_weights,
    measure,
    measure_steps,
    read_row,
    sites_of,
    timings_of,
)
from opslot.bench.baselines import BASELINES, check_baselines, load_peers, peer_kernels
from opslot.bench.checks import Claim, cannot_run, prove, summed_up
from opslot.slots import OpSlot, read_profile, write_profile
from opslot.verify.isolated import Lost, Processes
from opslot.verify.parity import CheckResult, compare, expect

STANDARD = KERNEL_REGISTRY.op("rms_norm").variant("standard")
WIDE = (("heads", 1), ("width", 24))


def wrong(hidden_states, weight, eps):
    x = hidden_states.float()
    return (weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * 1.01).to(hidden_states.dtype)


def right(hidden_states, weight, eps):
    return nn.functional.rms_norm(hidden_states, weight.shape, weight, eps)


@pytest.fixture
def kernels():
    """Two kernels of rms_norm/standard that would win if the check did not tell them apart."""
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
    sites = sites_of(Norm(), torch.device("cpu"), torch.float32)
    assert [(s.op, s.variant, s.shape) for s in sites] == [("rms_norm", "standard", WIDE)]
    found = bench(["rms_norm"], device="cpu", dtype=torch.float32, sites=sites, tokens=tokens, **options)
    return {row.kernel: row for row in found}


def test_a_wrong_kernel_has_no_time_that_counts_and_is_never_chosen(kernels, tmp_path, monkeypatch):
    rows = rows_at(2, compiled=False)
    assert {"eager", "torch_fused", "wrong", "right"} <= set(rows)
    assert rows["wrong"].ms > 0
    assert not rows["wrong"].counts
    assert rows["wrong"].verdict.startswith("WRONG model width: ")
    assert rows["right"].counts
    assert rows["eager"].shape == {"width": 24, "heads": 1}
    (timing,) = timings_of(rows.values())
    assert timing.failed == {"wrong": rows["wrong"].verdict}
    assert set(timing.ms) == {name for name, row in rows.items() if row.counts}

    monkeypatch.setenv("OPSLOT_PROFILE", str(tmp_path / "profile.json"))
    write_profile([replace(timing, ms={**timing.ms, "right": 1e-6})], CPU)
    report = bind(Norm())
    assert report.chosen("rms_norm") == ("right",), "which has no rank, but was measured and proven here"
    assert dict(report.rows[0].rejected)["wrong"] == rows["wrong"].verdict
    write_profile([timing], CPU)
    fastest = min(timing.ms, key=timing.ms.get)
    assert bind(Norm()).chosen("rms_norm") == (fastest,)
    assert read_profile(CPU).at("rms_norm", "standard", "float32", {"width": 24, "heads": 1}) == timing


def test_a_kernel_that_breaks_at_size_only_is_found_on_what_is_timed():
    def breaks(hidden_states, weight, eps):
        return right(hidden_states, weight, eps) * (1.02 if hidden_states.shape == (70, 24) else 1.0)

    KERNEL_REGISTRY.register(KernelSpec("breaks", "rms_norm", "standard", lambda: breaks))
    try:
        row = rows_at(70, compiled=False)["breaks"]
    finally:
        KERNEL_REGISTRY.unregister("rms_norm", "standard", "breaks")
    assert row.verdict.startswith("WRONG 70x24: ")


def test_a_kernel_that_raises_is_a_row_and_the_rest_goes_on():
    def raises(hidden_states, weight, eps):
        raise RuntimeError("no such luck")

    KERNEL_REGISTRY.register(KernelSpec("raises", "rms_norm", "standard", lambda: raises))
    try:
        rows = rows_at(2, compiled=False)
    finally:
        KERNEL_REGISTRY.unregister("rms_norm", "standard", "raises")
    assert rows["raises"].ms is None
    assert "no such luck" in rows["raises"].verdict
    assert rows["torch_fused"].counts


def claim_of(kernel, case=STANDARD.cases[0].name, **fields):
    return Claim(
        **{"op": "rms_norm", "variant": "standard", "dtype": torch.float32, "device": "cpu"} | fields,
        kernel=kernel,
        case=case,
    )


def test_proofs_in_a_process_of_their_own_say_the_same():
    first, second = (c.name for c in STANDARD.cases[:2])
    claims = [
        claim_of("torch_fused", first),
        claim_of("torch_fused", second, variant="offset", dtype=torch.bfloat16),
    ]
    with Processes(2) as workers:
        assert prove(claims, workers) == dict.fromkeys(claims, "ok")
        # They are there for the next ones.
        assert prove(claims[:1], workers) == {claims[0]: "ok"}


def test_a_kernel_is_what_its_cases_say():
    assert summed_up([]) == "ok"
    assert summed_up(["ok", "refused: powers of two only"]) == "ok"
    assert summed_up(["refused: this", "refused: that"]) == "unproven: this"
    assert summed_up(["ok", "WRONG first", "refused: that", "WRONG second"]) == "WRONG first"
    assert summed_up(["ok", "unproven: its check was not done after 60 s"]).startswith("unproven")


def test_a_claim_that_takes_too_long_or_its_process_down_says_so():
    died, late = claim_of("fatal"), claim_of("slow")

    class Workers:
        def run(self, function, claims, spoils, limit):
            yield died, Lost("died")
            yield late, Lost(f"was not done after {limit:g} s")

    verdicts = prove([died, late], Workers())
    assert verdicts[died] == "WRONG: the process that checked it died"
    assert verdicts[late] == "unproven: its check was not done after 180 s"
    assert all(map(cannot_run, verdicts.values()))


def test_norms_are_compared_where_elements_are_too_many():
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
def test_measure_repeats_less_what_takes_long(monkeypatch, seconds, repeats):
    passed = []
    clock = SimpleNamespace(perf_counter=lambda: seconds * len(passed))
    monkeypatch.setattr("opslot.bench.timing.time", clock)
    assert measure(lambda: passed.append(1), torch.device("cpu")).ms == pytest.approx(1e3 * seconds)
    assert len(passed) == 3 + repeats


def test_measure_sees_the_time_that_is_taken(monkeypatch):
    # The process's own, not what others take of the machine.
    monkeypatch.setattr("opslot.bench.timing.time", SimpleNamespace(perf_counter=time.process_time))
    calls = []

    def quick():
        calls.append(1)
        torch.zeros(1)

    assert measure(quick, torch.device("cpu")).ms < 50
    assert len(calls) == 33


def test_peers_that_are_unknown_or_missing_are_one_error():
    with pytest.raises(ConfigError) as caught:
        check_baselines(["hf", "unsloth", "veomni"])
    message = str(caught.value)
    assert "'unsloth' is no peer; use hf, liger, quack, veomni" in message
    assert "veomni is not installed; pip install veomni, or name a folder" in message
    check_baselines(["hf", "veomni"], elsewhere=["veomni"])


def test_a_peer_that_does_not_import_is_one_error(monkeypatch):
    monkeypatch.setitem(BASELINES, "quack", replace(BASELINES["quack"], name="no_such_room"))
    with pytest.raises(ConfigError, match="quack is installed but cannot be imported: ModuleNotFoundError"):
        load_peers(["quack"])


def test_a_peer_that_raises_refuses(monkeypatch):
    def picky(x):
        raise AssertionError("bf16 only")

    class Room:
        KERNELS = {("toy", "standard"): {"picky": picky}}  # noqa: RUF012

    monkeypatch.setattr(type(BASELINES["hf"]), "load", lambda self: Room)
    kernels = peer_kernels(["hf"], "toy", "standard")
    assert list(kernels) == ["hf: picky"]
    with pytest.raises(KernelError, match="hf raised AssertionError: bf16 only"):
        kernels["hf: picky"](x=1)
    assert peer_kernels(["hf"], "toy", "other") == {}


def test_grouped_experts_of_transformers_are_right():
    (kernel,) = peer_kernels(["hf"], "moe_experts", "standard").values()
    variant = KERNEL_REGISTRY.op("moe_experts").variant("standard")
    case = variant.benchmark_case({"experts": 4, "top_k": 2, "hidden": 32, "intermediate": 16}, 24)
    expected = expect(variant, case.make(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0)))
    assert compare(kernel, expected, CheckResult("moe_experts", "standard", "hf", case.name, "float32")).ok


def test_weights_depend_on_names_alone():
    def model(seed):
        torch.manual_seed(seed)
        return nn.ModuleDict({"norm": nn.LayerNorm(4), "head": nn.Linear(4, 3)})

    first, second = model(0), nn.ModuleDict({"_orig_mod": model(1)})
    for m in (first, second):
        draw_weights(m, 0, 0.02)
    for (_, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(first["norm"].weight, torch.ones(4))
    assert torch.equal(first["head"].bias, torch.zeros(3))
    assert 0 < first["head"].weight.std() < 0.06


def test_steps_train_on_the_batches_in_turn():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, input_ids, labels, use_cache):
            return type("Output", (), {"loss": (self.weight - input_ids.float().mean()) ** 2})

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    result = measure_steps(model, optimizer, lambda i: torch.full((2, 3), i), 4, torch.device("cpu"))
    assert result["losses"] == [float(i) ** 2 for i in range(7)]
    assert result["tokens_per_s"] == pytest.approx(6 / result["ms"] * 1e3)
    assert result["peak_gib"] is None


def test_curves_are_compared_step_by_step():
    assert compare_curves([3.0, 2.0, 1.0], [3.0, 2.5, 0.9]) == pytest.approx({"largest": 0.5, "mean": 0.2, "last": 0.1})


def test_a_row_survives_json():
    row = BenchRow("rms_norm", "standard", "c", "eager", "float32", 2.0, 3.0, 1.0, None, "ok", {"width": 3}, 8)
    data = json.loads(json.dumps(as_dict(row)))
    assert data["share_of_floor"] == 0.5
    assert read_row(data) == row


@pytest.mark.parametrize("calls_before", [0, 1], ids=["in the proof at size", "while timed"])
def test_a_kernel_that_spoils_the_device_ends_the_run_after_its_row(calls_before):
    calls = []

    def illegal(hidden_states, weight, eps):
        if hidden_states.shape == (2, 24):
            calls.append(1)
            if len(calls) > calls_before:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return right(hidden_states, weight, eps)

    KERNEL_REGISTRY.register(KernelSpec("illegal", "rms_norm", "standard", lambda: illegal))
    sites = sites_of(Norm(), torch.device("cpu"), torch.float32)
    found = bench(["rms_norm"], device="cpu", dtype=torch.float32, sites=sites, tokens=2, compiled=False)
    rows = []
    try:
        with pytest.raises(KernelError, match="illegal left the device unsupported at 2x24"):
            collections.deque(map(rows.append, found))
    finally:
        KERNEL_REGISTRY.unregister("rms_norm", "standard", "illegal")
    assert rows[-1].kernel == "illegal"
    assert "CUDA error" in rows[-1].verdict
    assert ("eager" in {r.kernel for r in rows}) == bool(calls_before)


def test_a_peer_is_proven_on_what_is_timed(monkeypatch):
    class Room:
        KERNELS = {  # noqa: RUF012
            ("rms_norm", "standard"): {"good": right, "cheat": wrong, "picky": lambda **arguments: 1 / 0}
        }

    monkeypatch.setattr(type(BASELINES["hf"]), "load", lambda self: Room)
    rows = rows_at(70, compiled=False, against=["hf"])
    assert rows["hf: good"].counts
    assert rows["hf: cheat"].ms is not None
    assert rows["hf: cheat"].verdict.startswith("WRONG 70x24: ")
    assert rows["hf: picky"].ms is None
    assert rows["hf: picky"].verdict == "refused: hf raised ZeroDivisionError: division by zero"
    assert not {t for t in timings_of(rows.values())[0].ms if ":" in t}, "no peer enters a profile"


def test_a_case_too_large_for_float64_keeps_the_verdict_of_the_small_ones(monkeypatch):
    def no_memory(variant, arguments, seed=0):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("opslot.bench.ops.expect", no_memory)
    rows = rows_at(2, compiled=True)
    assert rows["torch_fused"].counts
    assert rows["torch_fused"].verdict.startswith("ok (on the check cases;")
    assert rows["torch.compile"].verdict.startswith("unproven")
    assert not rows["torch.compile"].counts


def test_the_sites_of_a_model_tell_norms_of_heads_from_its_own():
    import opslot

    config = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 99}
    config |= {"num_hidden_layers": 2, "intermediate_size": 48}
    from transformers import Qwen3Config

    model = opslot.build_foundation_model(Qwen3Config(**config), init_device="meta", ops_implementation="eager")
    found = {(s.op, s.variant, s.shape) for s in sites_of(model, torch.device("cpu"), torch.float32)}
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
        assert dict(made.shape) == dict(shape), "a case at a site's shape has that shape"
    assert len(variants) >= 5
