import pytest
import torch

import opslot
from opslot._base.errors import ConfigError
from opslot.trainer.kernels import pin_kernels


def build(model_folder, ops):
    torch.manual_seed(0)
    return opslot.build_foundation_model(model_folder, ops_implementation=ops)


def test_auto_takes_recorded_kernels(model_folder):
    model = build(model_folder, "auto")
    before = opslot.explain(model).to_dict()
    recorded = opslot.explain(build(model_folder, "eager")).to_dict()
    lines = pin_kernels(model, recorded)
    assert any("rms_norm stays eager as recorded" in line for line in lines)
    assert {row["chosen"] for row in opslot.explain(model).to_dict()["rows"]} == {"eager"}
    assert pin_kernels(model, recorded) == []
    assert any("rms_norm stays" in line for line in pin_kernels(build(model_folder, "auto"), recorded))
    assert pin_kernels(build(model_folder, "auto"), before) == []


def test_named_kernel_overrides_the_record(model_folder):
    recorded = opslot.explain(build(model_folder, "auto")).to_dict()
    model = build(model_folder, {"rms_norm_implementation": "eager"})
    lines = pin_kernels(model, recorded)
    changed = [row for row in recorded["rows"] if row["op"] == "rms_norm" and row["chosen"] != "eager"]
    assert len(lines) == sum(len(row["modules"]) for row in changed)
    assert all(line.endswith("is eager because rms_norm_implementation names it") for line in lines)


def test_unsupported_recorded_kernel_raises(model_folder):
    model = build(model_folder, "auto")
    recorded = opslot.explain(model).to_dict()
    for row in recorded["rows"]:
        if row["op"] == "rms_norm":
            row["chosen"] = "npu"
    with pytest.raises(ConfigError) as caught:
        pin_kernels(model, recorded)
    message = str(caught.value)
    assert "cannot be resumed with the kernels it was started with" in message
    assert "rms_norm_implementation='npu'" in message
    assert "name others in model.ops_implementation" in message
