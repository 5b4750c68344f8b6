"""Architectures and forms of other packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Shard
from transformers import AutoConfig, AutoModelForCausalLM

import opslot
from opslot._base.errors import ConfigError
from opslot.checkpoint import load_weights, save_weights
from opslot.distributed import ParallelPlan
from opslot.models import _registry, register_architecture
from opslot.models._registry import ARCHITECTURES, Registry, find_architecture
from opslot.models.discovery import collected_forms as collected
from opslot.models.discovery import finder, register_forms
from opslot.models.parallelize import parallel_plan
from opslot.patchgen import PatchConfig, PatchError
from opslot.patchgen.materialization import REGISTERED_PATCHES
from opslot.verify.tiny import tiny_config

TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}


@pytest.fixture(autouse=True)
def restored_architectures(monkeypatch, restored_registries):
    monkeypatch.setattr(_registry, "ARCHITECTURES", dict(ARCHITECTURES))
    yield
    REGISTERED_PATCHES.clear()


def build(arch="arcee"):
    return opslot.build_foundation_model(AutoConfig.for_model(arch, **TINY), ops_implementation="eager")


def test_entry_point_registers_an_architecture(monkeypatch):
    module = types.ModuleType("their_package")
    module.add = lambda: register_architecture("arcee", parallel_plan=lambda model: "theirs")
    monkeypatch.setitem(sys.modules, "their_package", module)
    point = importlib.metadata.EntryPoint("arcee", "their_package:add", "opslot.architectures")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point] if group == point.group else [])
    _registry._load_entry_points.cache_clear()
    assert find_architecture("arcee").plan(None) == "theirs"


def test_broken_entry_point_is_logged(monkeypatch, caplog):
    point = importlib.metadata.EntryPoint("x", "no_such_package:add", "opslot.architectures")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point] if group == point.group else [])
    _registry._load_entry_points.cache_clear()
    assert find_architecture("arcee") is not None
    assert "'no_such_package:add' of opslot.architectures failed: ModuleNotFoundError" in caplog.text


def test_registering_twice_requires_replace():
    register_architecture("arcee")
    register_architecture("arcee")
    with pytest.raises(ConfigError, match="architecture 'arcee' is already registered"):
        register_architecture("arcee", lambda model: [])
    register_architecture("arcee", lambda model: [], replace=True)


def test_registry_replaces_on_request():
    registry = Registry("thing")
    registry.register("a")(int)
    with pytest.raises(ConfigError, match="thing 'a' is already registered"):
        registry.register("a")(str)
    registry.register("a", replace=True)(str)
    assert registry.get("a") is str


def test_registered_patch_extends_what_is_discovered():
    module = "transformers.models.ministral.modeling_ministral"
    patch = PatchConfig(module)
    patch.set_attribute("MinistralMLP", "their_attribute", 7)
    register_architecture("ministral", patch=patch)
    with pytest.raises(PatchError, match="registered with another patch"):
        register_architecture("ministral", patch=PatchConfig(module))
    sys.modules.pop("opslot.generated.ministral", None)
    found = finder.find_patch("ministral", finder_release())
    assert "MinistralMLP.forward swiglu_mlp/standard" in found.slots
    assert finder.digest("ministral", finder_release()) != digest_without_additions()


def finder_release():
    from opslot.patchgen.source import installed_release

    return installed_release()


def digest_without_additions():
    REGISTERED_PATCHES.clear()
    return finder.digest("ministral", finder_release())


_PATCHED = """
import inspect
import logging
from transformers import AutoModelForCausalLM
from transformers.models.arcee import modeling_arcee
import opslot
from opslot.models import register_architecture
from opslot.patchgen import PatchConfig
from opslot.verify.tiny import tiny_config

logging.basicConfig(format="%(message)s", force=True)
patch = PatchConfig("transformers.models.arcee.modeling_arcee")
patch.override_method("ArceeForCausalLM.forward", "def forward(self, input_ids, **kwargs):\\n    return input_ids\\n")
patch.modify_init("ArceeModel", "def f(self, config):\\n    self.extra = 1\\n")
mlp = "    def forward(self, x):\\n        return self.up_proj(x)\\n"
init = "    def __init__(self, config):\\n        super().__init__()\\n        self.in_proj = nn.Identity()\\n"
patch.replace_class("ArceeMLP", f"class ArceeMLP(nn.Module):\\n{init}{mlp}")
# With the same constructor, which is not reported.
patch.replace_class("ArceeRMSNorm", inspect.getsource(modeling_arcee.ArceeRMSNorm))
register_architecture("arcee", patch=patch)
print(opslot.build_foundation_model(tiny_config("arcee")).model.extra)
model = AutoModelForCausalLM.from_config(tiny_config("arcee"))
try:
    opslot.apply(model, {"cross_entropy_loss_implementation": "chunk_loss"})
except opslot.ConfigError as error:
    print(error)
"""


def test_what_a_registered_patch_replaces_is_reported(forks, tmp_path):
    script = tmp_path / "patched.py"
    script.write_text(_PATCHED)
    out, err = forks.start(script).communicate()
    assert out.startswith("1\n")
    assert "chunk_loss': ArceeForCausalLM.forward has no slot: is replaced by a patch; use eager or auto" in out
    assert err.count("changes ArceeModel.__init__, ArceeMLP.__init__, which has run before without the change") == 1


def test_forms_of_another_package(monkeypatch):
    monkeypatch.setattr(collected, "_registered", [])
    before = collected.forms_digest()
    form = object()
    register_forms([form], digest="1")
    assert collected.all_forms()[-1] is form
    assert collected.forms_digest() != before


def test_key_of_generated_modules_depends_on_each_file_of_forms(monkeypatch):
    before, content = collected.forms_digest(), collected._content
    ops = Path(str(importlib.util.find_spec("opslot.ops").origin)).parent
    for changed in sorted(ops.glob("*/*forms.py")):
        with monkeypatch.context() as patch:
            patch.setattr(collected, "_content", lambda file, c=changed: b"changed" if file == c else content(file))
            assert collected.forms_digest() != before, changed


def test_parallel_plan_of_a_class_is_used():
    model = build()
    plan = {"ep": {"model.embed_tokens.weight": Shard(0)}}

    class Own(type(model)):
        def get_parallel_plan(self):
            return ParallelPlan(extra_parallel_plan=plan)

    model.__class__ = Own
    assert parallel_plan(model).extra_parallel_plan == plan


class Halved:
    """Halves the final norm: the checkpoint stores it doubled."""

    def can_handle(self, name):
        return name == "model.norm.weight"

    def convert(self, name, tensor):
        return [(name, tensor / 2)]

    def finalize(self):
        return []


def test_checkpoint_converter_of_a_class_is_used(tmp_path):
    model = build()
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    save_weights(model, tmp_path)

    class Own(type(model)):
        _create_checkpoint_tensor_converter = staticmethod(lambda model: Halved())

    model.__class__ = Own
    opslot.models.load_foundation_weights(model, tmp_path)
    assert torch.equal(model.model.norm.weight, torch.ones(16))


class Renamed:
    """Reads a checkpoint that calls the base model `transformer`."""

    def can_handle(self, name):
        return name.startswith("transformer.")

    def convert(self, name, tensor):
        return [(name.replace("transformer.", "model.", 1), tensor)]

    def finalize(self):
        return []


@pytest.mark.parametrize("ops", ["eager", None])
def test_checkpoint_converters_of_a_model_with_another_model_type(ops):
    model = AutoModelForCausalLM.from_config(tiny_config("llama4_text"))
    if ops is not None:
        opslot.apply(model, ops)
    register_architecture("llama4", lambda model: [Halved()], replace=True)
    assert [type(converter) for converter in _registry.converters_of(model)] == [Halved]


def test_checkpoint_converter_gets_the_names_of_the_file(tmp_path):
    model, other = build(), build()
    file = save_weights(other, tmp_path) / "model.safetensors"
    tensors = {name.replace("model.", "transformer.", 1): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    load_weights(model, tmp_path, converters=[Renamed()])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
