"""Checks of models whose encoders are timm's, in which no config has the size of images."""

import pytest

from opslot.verify import check_architecture

pytest.importorskip("timm")


@pytest.mark.parametrize(
    ("arch", "samples"),
    [
        ("perception_lm", ("text", "image")),
        ("fast_vlm", ("text", "image")),
        pytest.param("gemma3n", ("text", "image", "audio", "mixed"), marks=pytest.mark.slow),
    ],
)
def test_samples_have_images(arch, samples):
    found = check_architecture(arch, checks=("eager", "packed", "frozen"))
    assert found.ok, found
    assert found.samples == samples
