"""Model classes outside Transformers, and checkpoints that ship them."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
# The model's class and the files that it needs.
MODELS = {
    "sparrow": ("SparrowForCausalLM", ("modeling_sparrow",)),
    "finch": ("FinchForCausalLM", ("modeling_finch", "layers_finch", "rotary_finch")),
    "wren": ("WrenForCausalLM", ("modeling_wren",)),
}


def ship(name, folder, changes=(), **config):
    """Write a checkpoint's folder with the code of a model, and no weights.

    Args:
        changes: pairs of texts, each of which replaces another in the code.
        config: values of config.json.
    """
    cls, files = MODELS[name]
    folder.mkdir()
    for file in ("configuration_sparrow", *files):
        # Only the file that tests import registers its classes.
        text = (HERE / f"{file}.py").read_text().partition("# Raises the second time.")[0]
        for old, new in (('model_type = "sparrow"', 'model_type = "shipped_sparrow"'), *changes):
            text = text.replace(old, new)
        (folder / f"{file}.py").write_text(text)
    auto_map = {
        "AutoConfig": "configuration_sparrow.SparrowConfig",
        "AutoModelForCausalLM": f"modeling_{name}.{cls}",
    }
    values = {"model_type": "shipped_sparrow", "architectures": [cls], "auto_map": auto_map, **config}
    (folder / "config.json").write_text(json.dumps(values))
    return folder
