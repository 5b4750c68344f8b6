"""Model classes in Python code that ships with a checkpoint."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import opslot
from opslot._base.errors import ConfigError
from opslot.checkpoint import export_hf

CONFIG = """
from transformers import PretrainedConfig

class TinyOwnConfig(PretrainedConfig):
    model_type = "tiny_own"

    def __init__(self, vocab_size=16, hidden_size=8, **options):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        super().__init__(**options)
"""
MODEL = """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from opslot import OpSlot
from .configuration_tiny_own import TinyOwnConfig

class TinyOwnNorm(nn.RMSNorm):
    SLOT

    def forward(self, x):
        slot = getattr(self, "rms_norm", None)
        return super().forward(x) if slot is None else slot(x, self.weight, self.eps)

class TinyOwnForCausalLM(PreTrainedModel):
    config_class = TinyOwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = TinyOwnNorm(config.hidden_size, 1e-6)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, labels=None, **options):
        return CausalLMOutput(logits=self.lm_head(self.norm(self.embed(input_ids))))
"""


@pytest.fixture
def folder(tmp_path, modules_cache):
    """A checkpoint's folder with its code; `folder(slot)` fills the class body of its norm."""

    def make(slot="pass"):
        path = tmp_path / "tiny_own"
        path.mkdir()
        (path / "configuration_tiny_own.py").write_text(CONFIG)
        (path / "modeling_tiny_own.py").write_text(MODEL.replace("SLOT", slot))
        auto_map = {
            "AutoConfig": "configuration_tiny_own.TinyOwnConfig",
            "AutoModelForCausalLM": "modeling_tiny_own.TinyOwnForCausalLM",
        }
        config = {"model_type": "tiny_own", "architectures": ["TinyOwnForCausalLM"], "auto_map": auto_map}
        (path / "config.json").write_text(json.dumps(config))
        return path

    return make


def test_own_slots_are_bound_and_the_code_is_exported(folder, tmp_path):
    model = opslot.build_foundation_model(folder('rms_norm = OpSlot("rms_norm")'), trust_remote_code=True)
    assert "TinyOwnNorm.rms_norm" in str(opslot.explain(model))
    exported = export_hf(model, tmp_path / "exported")
    loaded = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    ids = torch.arange(8)[None]
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_code_without_slots(folder, monkeypatch):
    path = folder()
    reason = "cross_entropy_loss of TinyOwnForCausalLM: it computes its loss in another module"
    with pytest.raises(ConfigError, match=reason):
        opslot.build_foundation_model(path, trust_remote_code=True)
    monkeypatch.setenv("OPSLOT_BACKEND", "hf")
    assert type(opslot.build_foundation_model(path, trust_remote_code=True)).__name__ == "TinyOwnForCausalLM"


def test_code_does_not_run_unless_it_is_allowed(folder):
    path = folder("raise SystemExit")
    with pytest.raises(ConfigError, match="tiny_own"):
        opslot.build_foundation_model(path)
