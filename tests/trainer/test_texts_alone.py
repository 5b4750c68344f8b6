"""Task pretrain with models that also take images or audio."""

import re

import pytest

from opslot.verify.tiny import tiny_config


@pytest.fixture
def train_model(settings, train, tmp_path, tokenizer):
    def run(model_type):
        config = tiny_config(model_type)
        config.get_text_config().vocab_size = 260
        config.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        settings["model"] = {"config_path": str(tmp_path / "model")}
        settings["data"]["packing"] = False
        settings["train"]["max_steps"] = 1
        return train()

    return run


def test_required_token_types_of_texts_are_zero(train_model):
    """Molmo2 raised: `mm_token_type_ids` is required as a model input when training."""
    code, _, err = train_model("molmo2")
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("model_type", "found"),
    [
        ("blip-2", "missing 1 required positional argument: 'pixel_values'"),
        ("kosmos-2", "You have to specify either `pixel_values` or `image_embeds`."),
    ],
)
def test_model_that_requires_images_raises(train_model, model_type, found):
    code, _, err = train_model(model_type)
    assert code == 2
    assert re.search("cannot train on texts without images, videos or audio\n +found: .*" + re.escape(found), err)
    assert "Traceback" not in err
