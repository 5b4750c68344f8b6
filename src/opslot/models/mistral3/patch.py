"""Mistral 3: an image of one feature also trains alone in its batch, where Transformers removes the axis of features.

The projector returns the features of all images, [N, D]; what Transformers removes from one feature is that N.
"""

from __future__ import annotations

from opslot.patchgen import PatchConfig

patch = PatchConfig("transformers.models.mistral3.modeling_mistral3")
patch.replace("Mistral3Model.get_image_features", "image_features.squeeze(0)", "image_features")
