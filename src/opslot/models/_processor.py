"""`build_processor`: what turns text (and images, audio) into a model's inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from opslot._base.errors import ConfigError
from opslot.models._registry import MODEL_PROCESSOR_REGISTRY

# Where a folder names its processor's class, most specific first.
_NAMED_IN = (("processor_config.json", "processor_class"), ("tokenizer_config.json", "processor_class"))


def build_processor(folder: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load the processor or tokenizer of a Hugging Face folder.

    A class filed in `MODEL_PROCESSOR_REGISTRY` under the name that the folder gives comes before Transformers' own; a
    folder that names none holds a tokenizer.

    Args:
        folder: holds tokenizer.json or processor_config.json.
        trust_remote_code: allow code that ships with the folder to run.

    Raises:
        ConfigError: there is no such folder, or nothing in it can be loaded.
    """
    from transformers import AutoProcessor, AutoTokenizer

    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"processor folder {str(folder)!r}: no such folder; give one with tokenizer.json")
    name = _class_name(path)
    if name is not None and name in MODEL_PROCESSOR_REGISTRY:
        loader = MODEL_PROCESSOR_REGISTRY.get(name)()
    else:
        loader = AutoProcessor if name is not None else AutoTokenizer
    try:
        return loader.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        files = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        raise ConfigError(
            f"{str(folder)!r} holds no processor that can be loaded: {error}",
            found=files,
            hint="give a folder with tokenizer.json or processor_config.json",
        ) from error


def _class_name(path: Path) -> str | None:
    for file, key in _NAMED_IN:
        if (path / file).is_file():
            found = json.loads((path / file).read_text()).get(key)
            if found:
                return found
    return None
