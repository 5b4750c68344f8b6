"""Layer norms of Transformers' own classes; those of torch's need no slot. Does not import torch."""

import re

from opslot.patchgen.forms import MethodForms, Reviewed

NORMS = MethodForms(
    op="layer_norm",
    helper="_norm",
    rows=(
        Reviewed(
            "528912eb7ccb",
            "standard",
            "weight * (x - mean) / std in fp32, cast back",
            "cohere, cohere2, cohere2_moe",
            args="{0}, self.weight, None, self.variance_epsilon{rest}",
            returns="{call}.to({0}.dtype)",
        ),
        Reviewed(
            "9eda30e8cb5e",
            "standard",
            "(x - mean) / std in fp32, cast back",
            "olmo",
            args="{0}, None, None, 1e-05{rest}",
            returns="{call}.to({0}.dtype)",
        ),
    ),
    # T5's "layer norms" subtract no mean: they are RMS norms, which rms_norm reports.
    candidate=lambda name, text: "LayerNorm" in name and "rsqrt" in text and bool(re.search(r"\w - \w", text)),
    reason="computes another norm than the reviewed forms",
)

FORMS = (NORMS,)
