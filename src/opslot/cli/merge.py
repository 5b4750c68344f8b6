"""`opslot merge`: a checkpoint with LoRA adapters added to its weights."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from opslot._base.errors import ConfigError
from opslot._base.hub import local_model

# What a checkpoint has beside weights and model config.
_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "*processor_config.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "tekken.json",
)


def run(options: argparse.Namespace) -> int:
    """Write the base model with the adapters added, in the hub's layout and the base's dtype.

    The parts of an omni model's checkpoint that its model is built without are copied.

    Raises:
        ConfigError: no adapters, no base model, adapters of a classifier, or a destination that is not empty.
        CheckpointError: an adapter or a base that cannot be read, or that do not fit each other.
    """
    from opslot.checkpoint import export_hf
    from opslot.checkpoint.adapters import ADAPTER_CONFIG, base_folder, load_adapter, read_adapter_config
    from opslot.checkpoint.excluded import has_excluded_parts
    from opslot.models import build_foundation_model

    adapter, destination = str(local_model(options.adapter)), options.destination
    if not (Path(adapter) / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"{adapter!r} is not a folder of adapters",
            found="no such folder" if not Path(adapter).is_dir() else f"no {ADAPTER_CONFIG}",
            hint="give the folder hf of a run with lora, train.output_dir/hf",
        )
    config = read_adapter_config(adapter)
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise ConfigError(
            f"{adapter} has the adapters of a classifier, whose labels are not in it",
            hint="set lora.merge: true in the run that trains it, which also exports the merged model",
        )
    if Path(destination).exists() and (not Path(destination).is_dir() or any(Path(destination).iterdir())):
        raise ConfigError(f"{destination!r} exists and is not an empty folder", hint="give another destination")
    # Last, since weights of the hub take long.
    folder = local_model(options.base) if options.base else base_folder(config)
    if folder is None or not Path(folder).is_dir():
        raise ConfigError(
            f"the base model of {adapter} is not a folder", found=str(folder), hint="give its folder with --base"
        )
    model = build_foundation_model(
        folder,
        weights_path=folder,
        ops_implementation="eager",
        init_device="cpu",
        trust_remote_code=options.trust_remote_code,
    )
    load_adapter(model, adapter)
    saved = export_hf(
        model,
        destination,
        max_shard_size=options.max_shard_size,
        merge_adapters=True,
        source=folder,
        keep_excluded=has_excluded_parts(model, folder),
    )
    for source in (Path(folder), Path(adapter)):
        for pattern in _COPIED:
            for file in source.glob(pattern):
                shutil.copy2(file, saved / file.name)
    print(f"wrote {saved}")
    return 0
