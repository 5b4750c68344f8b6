"""Models whose classes are not in Transformers: a user's, and those that ship with a checkpoint."""

import copy
import os
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import opslot
from opslot._base.errors import ConfigError
from opslot.checkpoint import export_hf
from opslot.checkpoint.initialize import initialize_weights
from opslot.models._own_classes import own_slots, with_slots
from opslot.models._sequence.packing import packing_problem
from opslot.models.discovery import discover
from opslot.patchgen.names import architecture_from, modeling_module
from opslot.verify.random_model import packed_batches, train_step, worst_difference
from tests.models.steps import assert_equal, assert_near, run
from tests.models.tiny import with_noise
from tests.own_code import ship
from tests.own_code.configuration_sparrow import SparrowConfig
from tests.own_code.modeling_finch import FinchForCausalLM
from tests.own_code.modeling_sparrow import RootScale, SparrowForCausalLM
from tests.own_code.modeling_wren import WrenForCausalLM

CLASSES = [SparrowForCausalLM, FinchForCausalLM, WrenForCausalLM]
SLOTS = {
    SparrowForCausalLM: {
        "SparrowAttention.rotary_pos_emb",
        "SparrowDecoderLayer.rms_norm",
        "SparrowFeedForward.swiglu_mlp",
        "RootScale.rms_norm",
        "SparrowForCausalLM.cross_entropy_loss",
    },
    FinchForCausalLM: {
        "FinchAttention.rotary_pos_emb",
        "FinchExperts.moe_experts",
        "FinchNorm.rms_norm",
        "FinchForCausalLM.cross_entropy_loss",
    },
    WrenForCausalLM: {
        "WrenDecoderLayer.rms_norm",
        "WrenMLP.swiglu_mlp",
        "WrenRMSNorm.rms_norm",
        "WrenForCausalLM.cross_entropy_loss",
    },
}


def model_of(cls, noise=0.1):
    torch.manual_seed(0)
    return with_noise(cls(SparrowConfig()), noise)


def slots_of(model):
    return {row.slot.partition(" ")[0] for row in opslot.explain(model) if row.slot != "model"}


@pytest.mark.parametrize("cls", CLASSES)
def test_slots_of_copied_layers(cls):
    original = model_of(cls)
    model = copy.deepcopy(original)
    opslot.apply(model, "eager")
    assert slots_of(model) == SLOTS[cls]
    assert isinstance(model, cls)
    assert_equal(run(model), run(original))


@pytest.mark.parametrize("cls", CLASSES)
def test_kernels_compute_the_same(cls):
    original = model_of(cls)
    model = copy.deepcopy(original)
    table = str(opslot.apply(model, {"cross_entropy_loss_implementation": "chunk_loss"}))
    assert "torch_fused" in table
    assert_near(run(model), run(original))
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for twin in twins:
        assert type(twin) is type(model)
        assert_equal(run(twin), run(model))
    opslot.restore(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]
    assert_equal(run(model), run(original))


def test_other_instances_are_unchanged():
    first, second = model_of(SparrowForCausalLM), model_of(SparrowForCausalLM)
    opslot.apply(first)
    assert type(second.model.norm) is RootScale
    assert with_slots(RootScale) is type(first.model.norm)
    assert "opslot" not in "".join(vars(sys.modules[SparrowForCausalLM.__module__]))


@pytest.mark.parametrize("cls", [SparrowForCausalLM, FinchForCausalLM])
def test_packed_documents_equal_the_documents_alone(cls):
    model = model_of(cls)
    assert packing_problem(model) is None
    opslot.apply(model)
    assert packing_problem(model) is None
    packed, alone = packed_batches(torch.arange(2, 42).reshape(2, 20), rows=2)
    for batch in (*packed, *alone):
        batch["input_ids"] = batch["input_ids"] % 58 + 3
    assert not worst_difference(train_step(model, packed), train_step(model, alone))


def test_packing_is_rejected_where_masks_are_a_models_own():
    model = model_of(WrenForCausalLM)
    opslot.apply(model)
    assert packing_problem(model) == "WrenAttention calls scaled_dot_product_attention, which may mix tokens"
    with pytest.raises(opslot.OpslotError, match="cannot keep packed documents"):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64), cu_seq_lens_q=torch.tensor([0, 2, 4], dtype=torch.int32))


def test_reasons_of_code_of_other_forms():
    skips = {skip.symbol: skip.reason for skip in discover(architecture_from(WrenForCausalLM.__module__)).skips}
    assert skips == {
        "WrenAttention": "computes attention itself, without Transformers' attention interface",
        "apply_rotary_pos_emb": "rotates in another way than the reviewed forms",
    }
    with pytest.raises(ConfigError, match="rotates in another way"):
        opslot.apply(model_of(WrenForCausalLM), {"rotary_pos_emb_implementation": "torch_fused"})


@pytest.mark.parametrize(
    "name", ["a.b", "_a._b_", "__main__", "a__b.c", "a_5f.b_", "llama", "transformers_modules._5f.x"]
)
def test_names_of_architectures_are_those_of_modules(name):
    architecture = architecture_from(name)
    assert modeling_module(architecture) == name
    assert "." not in architecture
    assert architecture not in ("llama", name)
    assert architecture_from("transformers.models.llama.modeling_llama") == "llama"


class Local(nn.Module):
    """Its methods are replaced in a test."""

    def forward(self, x):
        return x


def test_classes_without_their_source_keep_their_code(caplog, monkeypatch):
    namespace = {"__name__": "a_notebook", "nn": nn, "PreTrainedModel": PreTrainedModel, "SparrowConfig": SparrowConfig}
    exec("class Norm(nn.Module):\n    def forward(self, x):\n        return x * 2", namespace)
    with pytest.raises(ConfigError, match=r"Norm is not a class at the top level of the module a_notebook"):
        opslot.apply(namespace["Norm"]())
    model = model_of(SparrowForCausalLM)
    model.extra = namespace["Norm"]()
    opslot.apply(model)
    expected = (
        "Norm is not a class at the top level of the module a_notebook; it keeps its own code, and has no kernels"
    )
    assert expected in caplog.text
    assert type(model.extra) is namespace["Norm"]

    monkeypatch.setattr(Local, "forward", lambda self, x: 2 * x)
    assert "methods of Local were replaced" in own_slots(Local).problem


def test_methods_replaced_after_apply_run_after_the_next(monkeypatch):
    """In models that were bound before, and in new ones."""
    model, ids = model_of(SparrowForCausalLM).eval(), torch.arange(2, 14).reshape(2, 6)
    new, original = copy.deepcopy(model), copy.deepcopy(model)
    opslot.apply(model)
    before = model(input_ids=ids).logits
    forward = RootScale.forward
    monkeypatch.setattr(RootScale, "forward", lambda self, x: forward(self, x) / 2)
    expected = original(input_ids=ids).logits
    assert "RootScale.forward, or a function that it calls, was replaced" in str(opslot.explain(model))
    for each in (model, new):
        opslot.apply(each)
        torch.testing.assert_close(each(input_ids=ids).logits, expected)
    monkeypatch.undo()
    opslot.apply(model)
    torch.testing.assert_close(model(input_ids=ids).logits, before)
    assert "RootScale.rms_norm" in slots_of(model)


def test_modules_edited_after_the_import_are_not_read(tmp_path, monkeypatch):
    file = tmp_path / "edited_after_import.py"
    text = (
        "import torch\nfrom torch import nn\n\n\nclass Norm(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.weight = nn.Parameter(torch.ones(4))\n        self.eps = 1e-6\n\n"
        "    def forward(self, x):\n        return self.weight * x\n"
    )
    file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import edited_after_import

    file.write_text(text.replace("self.weight * x", "self.weight + x"))
    assert "edited in" in own_slots(edited_after_import.Norm).problem


# FACTOR is defined after `opslot.apply`.
SCRIPT = """
import copy, pickle, sys
import torch
from torch import nn

import opslot
from tests.own_code.modeling_sparrow import SparrowForCausalLM, RootScale
from tests.own_code.configuration_sparrow import SparrowConfig


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-6

    def forward(self, hidden):
        kind = hidden.dtype
        hidden = hidden.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden.to(kind)


class Twice(SparrowForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.loss = output.loss * FACTOR
        return output


print("started")
torch.manual_seed(0)
model = Twice(SparrowConfig())
model.model.norm = Scale(32)
original = copy.deepcopy(model)
print(opslot.apply(model, {"cross_entropy_loss_implementation": "chunk_loss"}))
FACTOR = 2.0
ids = torch.arange(2, 24).reshape(2, 11)
assert isinstance(model, Twice)
pickled = pickle.loads(pickle.dumps(model))
losses = [m(input_ids=ids, labels=ids).loss.item() for m in (original, model, pickled)]
assert abs(losses[0] - losses[1]) < 1e-4 and losses[1] == losses[2], losses
opslot.restore(model)
assert type(model) is Twice and type(model.model.norm) is Scale
print("done")
"""


def test_classes_of_a_script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in [os.getcwd(), *sys.path] if path)}
    command = [sys.executable, tmp_path / "script.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("started") == 1
    assert "Scale.rms_norm" in done.stdout
    assert "Twice.cross_entropy_loss" in done.stdout


def test_shipped_code(tmp_path, modules_cache):
    """In two files, and with the same names as another checkpoint's."""
    paths = [
        ship("finch", tmp_path / "first"),
        ship("finch", tmp_path / "second", [("self.weight * states", "(1 + self.weight) * states")]),
    ]
    models = [opslot.build_foundation_model(path, trust_remote_code=True) for path in paths]
    assert [slots_of(model) for model in models] == [
        SLOTS[FinchForCausalLM],
        SLOTS[FinchForCausalLM] - {"FinchNorm.rms_norm"},
    ]
    (first, second) = ({type(m).__module__ for m in model.modules()} for model in models)
    assert not {name for name in first & second if name.startswith("transformers_modules")}
    for number, model in enumerate(models):
        exported = export_hf(model, tmp_path / f"exported_{number}")
        loaded = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
        assert type(loaded).__name__ == "FinchForCausalLM"
        assert_near(run(model.train(False)), run(loaded.train(False)))
        again = opslot.build_foundation_model(exported, exported, trust_remote_code=True)
        assert slots_of(again) == slots_of(model)


def test_meta_models_are_initialized_as_their_code_does(tmp_path, modules_cache):
    folder = ship("finch", tmp_path / "finch")
    model = opslot.build_foundation_model(folder, init_device="meta", trust_remote_code=True)
    initialize_weights(model, device="cpu")
    assert bool((model.model.norm.weight == 1).all())
    assert 0.01 < model.model.layers[0].mixture.experts.gate_up_proj.std() < 0.03


def test_module_without_dots(tmp_path, monkeypatch):
    text = textwrap.dedent(
        """
        from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

        class Norm(LlamaRMSNorm):
            pass

        class Half(LlamaMLP):
            def forward(self, x):
                return super().forward(x) * 0.5
        """
    )
    (tmp_path / "layers_of_mine.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import layers_of_mine
    from transformers import LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=8, intermediate_size=16, num_attention_heads=2)
    model = nn.Sequential(layers_of_mine.Norm(8), layers_of_mine.Half(config))
    x = torch.randn(3, 8)
    wanted = model(x)
    opslot.apply(model)
    assert {row.slot for row in opslot.explain(model)} == {"Norm.rms_norm", "Half.swiglu_mlp"}
    torch.testing.assert_close(model(x), wanted)
