"""Model types that use the model classes of another type in Transformers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import opslot
from opslot._base.errors import ConfigError
from opslot.models import serve_model_type
from opslot.models._registry import find_architecture

FOLDERS = Path(transformers.__file__).parent / "models"


def aliased_model_types() -> dict[str, str]:
    """Each model_type without model classes in a file of its folder's name, and the architecture of its model."""
    found = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        folder = model_type_to_module_name(model_type)
        if not (FOLDERS / folder / f"modeling_{folder}.py").is_file():
            cls = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
            found[model_type] = cls.__module__.rpartition(".modeling_")[2]
    return found


pytestmark = pytest.mark.usefixtures("restored_registries")


def test_aliases_use_the_architecture_of_their_models() -> None:
    aliases = aliased_model_types()
    assert "gpt-sw3" in aliases
    for model_type, folder in aliases.items():
        assert serve_model_type(model_type) == (find_architecture(folder) is not None), model_type


@pytest.mark.parametrize("model_type", sorted(t for t, folder in aliased_model_types().items() if folder == "llama"))
def test_llama_aliases(model_type, tmp_path) -> None:
    config = AutoConfig.for_model(
        model_type,
        vocab_size=40,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    wanted = AutoModelForCausalLM.from_config(config).train()
    wanted.save_pretrained(tmp_path)
    ids = torch.randint(1, 40, (2, 9))
    loss = wanted(input_ids=ids, labels=ids).loss
    for source in (config, tmp_path):
        found = opslot.build_foundation_model(source, weights_path=tmp_path, ops_implementation="eager")
        assert type(found).__module__ == "opslot.generated.llama"
        assert found.config.model_type == model_type
        assert torch.equal(found(input_ids=ids, labels=ids).loss, loss)


@pytest.mark.parametrize("name", ["Data2VecTextForMaskedLM", "Data2VecVisionForImageClassification"])
def test_architectures_in_the_folder_of_another_one(name) -> None:
    """data2vec has a file for each of text, images and audio, and none of its own name."""
    config = getattr(transformers, f"{name.partition('For')[0]}Config")(num_hidden_layers=1)
    with torch.device("meta"):
        model = getattr(transformers, name)._from_config(config)
    opslot.apply(model, device="cpu", dtype=torch.float32)
    assert type(model).__module__.startswith("opslot.generated.data2vec_")
    assert type(opslot.restore(model)) is getattr(transformers, name)


def test_data2vec_text_equals_transformers() -> None:
    from opslot.verify import check_architecture

    check = check_architecture("data2vec-text", checks=("eager", "auto", "checkpoint"))
    assert check.ok, check


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("DebertaForMaskedLM", "attention of DisentangledSelfAttention: it computes attention itself"),
        ("DebertaForMaskedLM", "cross_entropy_loss of DebertaForMaskedLM: it takes its logits from somewhere else"),
        ("LukeForMaskedLM", "attention of LukeSelfAttention: it computes attention itself"),
        ("WavLMModel", "attention of WavLMAttention: it computes attention itself"),
        (
            "Wav2Vec2BertModel",
            "attention of Wav2Vec2BertSelfAttention: it (passes position_bias|computes attention itself)",
        ),
    ],
)
def test_models_without_slots_name_the_reasons(name, reason) -> None:
    config = getattr(transformers, f"{re.sub('(For|Model).*', '', name)}Config")(num_hidden_layers=1)
    with torch.device("meta"):
        model = getattr(transformers, name)._from_config(config)
    with pytest.raises(ConfigError, match=f"(?s)nothing to bind in {name}.*{reason}"):
        opslot.apply(model)
