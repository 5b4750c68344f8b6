import json
import os
from dataclasses import replace

import pytest
import torch
from torch import nn

from opslot import KERNEL_REGISTRY, bind
from opslot._base.device import CPU
from opslot._base.errors import ConfigError
from opslot.slots import KernelRequest, Timing, read_profile, write_profile
from opslot.slots import profile as profile_module

from .conftest import TOY, Doubler


@pytest.fixture
def shaped(toy):
    """The toy op with the module's weight size as its shape."""
    variants = {
        name: replace(v, static_shape=lambda request: {"width": len(request.module.weight)})
        for name, v in TOY.variants.items()
    }
    KERNEL_REGISTRY._ops[TOY.name] = replace(TOY, variants=variants)
    return toy


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "cache" / "opslot" / "profile.json"
    monkeypatch.delenv("OPSLOT_PROFILE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


def timing(width=3, dtype="float32", failed=None, **ms):
    return Timing("toy_double", "standard", dtype, {"width": width}, 512, ms, failed or {})


def test_profile_round_trip(file):
    written = [timing(eager=2.0, fast=1.0), timing(width=7, eager=1.0, failed={"fast": "WRONG by much"})]
    assert write_profile(written, CPU) == file
    assert list(read_profile(CPU).timings.values()) == written
    assert read_profile(CPU).at("toy_double", "standard", "float32", {"width": 7}).failed == {"fast": "WRONG by much"}
    assert read_profile(CPU).at("toy_double", "standard", "float32", {"width": 8}) is None


def test_second_run_replaces_equal_shapes_and_keeps_others(file):
    write_profile([timing(eager=2.0), timing(width=7, eager=1.0)], CPU)
    write_profile([timing(eager=3.0)], CPU)
    assert [t.ms["eager"] for t in read_profile(CPU).timings.values()] == [3.0, 1.0]
    assert os.listdir(file.parent) == ["profile.json"]


def test_auto_selects_the_fastest_kernel_for_the_shape(shaped, file):
    write_profile([timing(eager=2.0, fast=1.5, unranked=1.25), timing(width=7, eager=0.5, fast=1.0)], CPU)
    narrow, wide, other = Doubler(), Doubler(), Doubler()
    wide.weight = nn.Parameter(torch.ones(7))
    other.weight = nn.Parameter(torch.ones(8))
    report = bind(nn.Sequential(narrow, wide, other))
    assert [row.chosen for row in report] == ["unranked", "eager", "fast"]
    assert report.rows[0].why.startswith("fastest measured here: 1.25 ms, eager 2 (512 tokens, profile of 20")
    assert dict(report.rows[0].rejected)["fast"] == "1.5 ms here"
    assert dict(report.rows[0].rejected)["eager"] == "2 ms here"
    assert report.rows[1].why.startswith("fastest measured here: 0.5 ms (512 tokens")
    assert report.rows[2].why == "highest priority, 10", "the ranks hold where nothing was measured"
    assert f"profile {file}: 2 shapes measured here" in str(report)


def test_kernel_that_failed_its_check_is_not_selected(shaped, file):
    write_profile([timing(eager=2.0, failed={"fast": "WRONG, out error 1.0e+00"})], CPU)
    report = bind(Doubler())
    assert report.chosen("toy_double") == ("eager",)
    assert dict(report.rows[0].rejected)["fast"] == "WRONG, out error 1.0e+00"


def test_unusable_kernel_is_not_selected(shaped, file):
    write_profile([timing(eager=2.0, needs_package=0.1, gpu_only=0.2, fast=3.0, gone_since=0.1)], CPU)
    assert bind(Doubler()).chosen("toy_double") == ("eager",)


def test_timings_of_another_dtype_are_ignored(shaped, file):
    write_profile([timing(dtype="bfloat16", eager=1.0, fast=2.0)], CPU)
    assert bind(Doubler()).chosen("toy_double") == ("fast",)
    assert bind(Doubler(), dtype=torch.bfloat16).chosen("toy_double") == ("eager",)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "NVIDIA H200", "capability": "9.0"}, "it holds NVIDIA H200 9.0, this is"),
        ({"versions": {"torch": "1.0"}}, "torch 1.0 (now "),
    ],
)
def test_profile_of_another_machine_is_ignored_with_a_reason(shaped, file, monkeypatch, change, reason):
    here = profile_module.machine_of(CPU)
    with monkeypatch.context() as patch:
        patch.setattr(profile_module, "machine_of", lambda device: {**here, **change})
        write_profile([timing(eager=1.0, fast=2.0)], CPU)
    report = bind(Doubler())
    assert report.chosen("toy_double") == ("fast",)
    assert f"profile {file} is ignored: " in str(report)
    assert reason in str(report)
    write_profile([timing(eager=1.0, fast=2.0)], CPU)
    assert bind(Doubler()).chosen("toy_double") == ("eager",)
    machines = json.loads(file.read_text())["machines"]
    assert len(machines) == (2 if "device" in change else 1), "other machines' timings stay, other versions' go"


BROKEN = ["{", "[]", '{"format": 99, "machines": []}', '{"format": 1, "machines": [{}]}', "[" * 100_000, ""]


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_invalid_profile_is_reported_and_ignored(shaped, file, monkeypatch, caplog, text):
    file.parent.mkdir(parents=True)
    file.write_text(text)
    report = bind(Doubler())
    assert report.chosen("toy_double") == ("fast",)
    assert "is ignored" in report.note
    assert sum("chosen without it" in r.message for r in caplog.records) <= 1
    monkeypatch.setenv("OPSLOT_PROFILE", str(file))
    with pytest.raises(ConfigError, match=r"OPSLOT_PROFILE: .*profile\.json") as caught:
        bind(Doubler())
    assert str(caught.value).count("profile.json") == 1
    assert bind(Doubler(), "eager").note == "", "a binding that leaves nothing to auto reads no profile"


@pytest.mark.parametrize(
    ("change", "expected_message"),
    [
        ({"ms": {"eager": 2.0, "fast": float("nan")}}, "toy_double/standard: fast took nan ms"),
        ({"ms": {"eager": 2.0, "fast": -1.0}}, "fast took -1.0 ms"),
        ({"ms": {"eager": 2.0, "fast": 0}}, "fast took 0 ms"),
        ({"ms": {"eager": 2.0, "fast": "1"}}, "fast took '1' ms"),
        ({"ms": {"eager": 2.0, "fast": None}}, "fast took None ms"),
        ({"ms": [1.0]}, "AttributeError"),
        ({"failed": None}, "failed None"),
        ({"tokens": "many"}, "tokens 'many'"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_invalid_timings_are_reported_and_ignored(shaped, file, monkeypatch, change, expected_message):
    write_profile([timing(eager=2.0, fast=1.0)], CPU)
    data = json.loads(file.read_text())
    data["machines"][0]["timings"][0].update(change)
    file.write_text(json.dumps(data))
    report = bind(Doubler())
    assert report.rows[0].why == "highest priority, 10"
    assert expected_message in report.note
    with pytest.raises(ConfigError, match=r"not a profile of opslot.*\n  hint: delete the file"):
        write_profile([], CPU)
    monkeypatch.setenv("OPSLOT_PROFILE", str(file))
    with pytest.raises(ConfigError, match=r"OPSLOT_PROFILE: .*not a profile of opslot"):
        bind(Doubler())


@pytest.mark.parametrize("missing", ["versions", "device", "timings"])
def test_incomplete_section_raises_on_write(file, missing):
    write_profile([], CPU)
    data = json.loads(file.read_text())
    del data["machines"][0][missing]
    file.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=f"not a profile of opslot: KeyError\\('{missing}'\\)"):
        write_profile([], CPU)


@pytest.mark.parametrize("text", [None, "{"])
def test_unreadable_profile_is_one_error(shaped, file, monkeypatch, text):
    if text is not None:
        file.parent.mkdir(parents=True)
        file.write_text(text)
    monkeypatch.setenv("OPSLOT_PROFILE", str(file))
    with pytest.raises(ConfigError, match=r"^OPSLOT_PROFILE.*profile\.json.* cannot be read") as caught:
        bind(nn.ModuleDict({"first": Doubler(), "second": Doubler()}))
    assert str(caught.value).count("OPSLOT_PROFILE") <= 2


def test_named_profile_must_exist_and_off_disables(shaped, file, monkeypatch):
    write_profile([timing(eager=1.0, fast=2.0)], CPU)
    monkeypatch.setenv("OPSLOT_PROFILE", str(file) + "x")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        bind(Doubler())
    monkeypatch.setenv("OPSLOT_PROFILE", "off")
    assert bind(Doubler()).chosen("toy_double") == ("fast",)
    with pytest.raises(ConfigError, match="no profile can be written"):
        write_profile([], CPU)


def test_unwritable_profile_raises(file, monkeypatch, tmp_path):
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("OPSLOT_PROFILE", str(tmp_path / "taken" / "profile.json"))
    with pytest.raises(ConfigError, match="cannot be written: "):
        write_profile([timing(eager=1.0)], CPU)


def test_named_kernel_overrides_the_profile(shaped, file):
    write_profile([timing(eager=1.0, fast=2.0)], CPU)
    request = KernelRequest("toy_double", "standard", CPU, torch.float32, Doubler())
    assert KERNEL_REGISTRY.resolve(request, "fast").chosen == "fast"
    assert KERNEL_REGISTRY.resolve(request, "auto").chosen == "eager"
