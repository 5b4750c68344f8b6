import copy
import pickle

import pytest
from torch import nn

import opslot
from opslot import OpsImplementationConfig, bind
from opslot._base.errors import ConfigError
from opslot.slots import config_fields

SPEC_FIELDS = {
    "attn_implementation",
    "cross_entropy_loss_implementation",
    "rms_norm_implementation",
    "swiglu_mlp_implementation",
    "rotary_pos_emb_implementation",
    "rotary_pos_emb_vision_implementation",
    "load_balancing_loss_implementation",
    "moe_implementation",
    "rms_norm_gated_implementation",
    "causal_conv1d_implementation",
    "chunk_gated_delta_rule_implementation",
}


def test_fields_of_the_specification_default_to_auto():
    config = OpsImplementationConfig()
    assert set(config_fields()) >= SPEC_FIELDS
    assert {getattr(config, field) for field in SPEC_FIELDS} == {"auto"}


def test_registered_op_has_a_field(toy):
    assert OpsImplementationConfig(toy_double_implementation="fast").toy_double_implementation == "fast"


def test_one_error_lists_all_problems(toy, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError) as caught:
        OpsImplementationConfig(
            rms_norm_implementaton="eager", toy_double_implementation="needs_package", moe_implementation="fused_tritn"
        )
    text = str(caught.value)
    assert "3 problems" in text
    assert "did you mean rms_norm_implementation" in text
    assert "requires the package no_such_package_x" in text
    assert "usable here: eager, fast" in text
    assert "gpu_only: requires an NPU" in text
    assert "did you mean 'fused_triton'" in text


def test_moe_alias_is_the_same_field():
    assert OpsImplementationConfig(moe_experts_implementation="eager").moe_implementation == "eager"
    assert OpsImplementationConfig(moe_implementation="eager").moe_experts_implementation == "eager"
    with pytest.raises(
        ConfigError, match="moe_experts_implementation and moe_implementation are the same field; set one"
    ):
        OpsImplementationConfig(moe_implementation="eager", moe_experts_implementation="eager")


def test_messages_name_the_alias_that_the_user_wrote():
    fields = {"moe_experts_implementation": "grouped_mm"}
    (why,) = [row.why for row in bind(nn.Linear(2, 2), fields).rows if row.op == "moe_experts"]
    assert why.startswith("moe_experts_implementation=grouped_mm, but")
    with pytest.raises(ConfigError, match="overrides: moe_experts_implementation=grouped_mm, but"):
        bind(nn.Sequential(nn.Linear(2, 2)), {"overrides": {"0": fields}})
    with pytest.raises(ConfigError, match="moe_experts_implementation='fast': no such implementation"):
        OpsImplementationConfig(moe_experts_implementation="fast")
    with pytest.raises(ConfigError, match=r"overrides\['0'\].moe_experts_implementation='fast'"):
        OpsImplementationConfig(overrides={"0": {"moe_experts_implementation": "fast"}})


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"rms_norm": "eager"}, "rms_norm is not a field; did you mean rms_norm_implementation?"),
        ({"overrides": {"model.*": {"preset": "eager"}}}, "preset is not a field; fields are adamw_implementation"),
    ],
)
def test_hints_name_fields_that_can_be_set_there(fields, found):
    with pytest.raises(ConfigError) as caught:
        OpsImplementationConfig(**fields)
    assert found in str(caught.value)


def test_errors_are_public():
    assert opslot.ConfigError is ConfigError
    for name in ("CheckpointError", "DataError", "KernelError", "ParallelError", "PatchError", "TrainingError"):
        assert issubclass(getattr(opslot, name), opslot.OpslotError)


def test_presets():
    eager = OpsImplementationConfig(preset="eager", rms_norm_implementation="auto")
    assert eager.moe_implementation == "eager"
    assert eager.rms_norm_implementation == "auto"
    with pytest.raises(ConfigError, match="use one of auto, veomni, eager, fp8, batch_invariant"):
        OpsImplementationConfig(preset="fast")


def test_veomni_preset_on_a_cpu_raises(monkeypatch):
    import torch

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if torch.cuda.is_available():
        pytest.skip("a GPU may have them")
    with pytest.raises(ConfigError) as caught:
        OpsImplementationConfig(preset="veomni")
    assert "attn_implementation='flash_attention_2': requires a GPU" in str(caught.value)
    assert "moe_implementation='fused_triton': requires a GPU" in str(caught.value)


def test_last_matching_override_wins(toy):
    config = OpsImplementationConfig(
        toy_double_implementation="fast",
        overrides={"a.*": {"toy_double_implementation": "eager"}, "a.b": {"toy_double_implementation": "unranked"}},
    )
    assert [config.choice("toy_double", "standard", p) for p in ("x", "a.c", "a.b")] == ["fast", "eager", "unranked"]
    with pytest.raises(ConfigError, match=r"overrides\['a'\]\.tou_implementation is not a field"):
        OpsImplementationConfig(overrides={"a": {"tou_implementation": "x"}})


@pytest.mark.parametrize("overrides", ["eager", ["model.*"], {"model.*": "eager"}, {"a": {3: "eager"}}, {3: {}}])
def test_invalid_overrides_raise(overrides):
    with pytest.raises(ConfigError, match=r"overrides=.* must map globs of module paths"):
        OpsImplementationConfig(overrides=overrides)


def test_invalid_value_in_an_override_names_its_glob(toy):
    with pytest.raises(ConfigError, match=r"- overrides\['a\.\*'\]\.toy_double_implementation='slow': no such"):
        OpsImplementationConfig(overrides={"a.*": {"toy_double_implementation": "slow"}})


def test_overrides_are_immutable(toy):
    given = {"a.*": {"toy_double_implementation": "fast"}}
    config = OpsImplementationConfig(overrides=given)
    given["a.*"]["toy_double_implementation"] = "nonsense"
    with pytest.raises(TypeError):
        config.overrides["a.*"]["toy_double_implementation"] = "nonsense"
    with pytest.raises(TypeError):
        config.overrides["b.*"] = {}
    assert config.choice("toy_double", "standard", "a.b") == "fast"
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config


def test_common_prefix_suggests_all_names():
    with pytest.raises(ConfigError, match="did you mean 'fused_triton' or 'fused_npu' or 'fused_quack'"):
        OpsImplementationConfig(moe_implementation="fused")


def test_round_trips(toy):
    config = OpsImplementationConfig(toy_double_implementation="fast", overrides={"a": {"moe_implementation": "eager"}})
    assert OpsImplementationConfig(**config.to_dict()) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_config_is_immutable():
    config = OpsImplementationConfig()
    with pytest.raises(ConfigError, match="make another"):
        config.rms_norm_implementation = "eager"
    assert config.rms_norm_implementation == config.choice("rms_norm", "standard") == "auto"
    assert copy.deepcopy(config) == config


@pytest.mark.parametrize("value", [None, "auto", {}, "eager", {"moe_implementation": "eager"}])
def test_make_accepts_valid_values(value):
    assert isinstance(OpsImplementationConfig.make(value), OpsImplementationConfig)


def test_make_rejects_invalid_values():
    with pytest.raises(ConfigError, match="found: int"):
        OpsImplementationConfig.make(3)
    with pytest.raises(ConfigError, match="a mapping by field names"):
        OpsImplementationConfig.make({1: "eager"})
    assert OpsImplementationConfig.make({"preset": "auto"}) == OpsImplementationConfig.make("auto")
    with pytest.raises(ConfigError, match="preset=3 is unknown"):
        OpsImplementationConfig.make({"preset": 3})
    with pytest.raises(ConfigError, match=r"preset=\['eager'\] is unknown"):
        OpsImplementationConfig.make({"preset": ["eager"]})
