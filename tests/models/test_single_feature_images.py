"""Images of a single feature, alone in their batch."""

import pytest
import torch

import opslot
from opslot.models._multimodal.images import visual_inputs
from opslot.models._multimodal.modalities import feature_module
from opslot.verify.random_model import random_model
from opslot.verify.tiny import tiny_config


@pytest.mark.quick("mistral3")
@pytest.mark.parametrize("arch", ["mistral3", "mistral_large4", "lighton_ocr"])
def test_image_of_one_feature_trains_alone(arch):
    """Transformers removes the axis of features where there is one: Mistral 3 raises."""
    try:
        config = tiny_config(arch)
    except opslot.ConfigError as error:
        pytest.skip(str(error).splitlines()[0])
    model = random_model(config).eval()
    opslot.apply(model, "eager")
    holder = feature_module(model)
    # Beside another image, also in Transformers.
    first, _ = holder.get_image_features(**visual_inputs(holder, "get_image_features", [(1, 1, 1), (1, 1, 2)]))[
        "pooler_output"
    ]
    (alone,) = holder.get_image_features(**visual_inputs(holder, "get_image_features", [(1, 1, 1)]))["pooler_output"]
    assert alone.shape == (1, config.get_text_config().hidden_size)
    torch.testing.assert_close(alone, first)
    ids = torch.tensor([[1, config.image_token_id, 2, 3]])
    inputs = visual_inputs(holder, "get_image_features", [(1, 1, 1)])
    model(input_ids=ids, labels=ids, **inputs, use_cache=False).loss.backward()
    assert next(p for n, p in model.named_parameters() if "vision" in n).grad.any()
