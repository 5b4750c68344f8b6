"""Load a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from opslot._base.errors import ConfigError
from opslot._base.hub import local_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Tokenizer from a folder that `save_pretrained` wrote, a tokenizer.json alone, or a model of the hub.

    Raises:
        ConfigError: no readable tokenizer at the path.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = local_model(path, weights=False)
    files: set[str] = set()
    if folder.is_file():
        alone: Path | None = folder
    else:
        alone = folder / "tokenizer.json" if not (folder / "tokenizer_config.json").is_file() else None
    try:
        if alone is not None and alone.is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(alone))
        if folder.is_dir():
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=trust_remote_code, local_files_only=True
            )
            files = set(getattr(tokenizer, "vocab_files_names", {}).values())
            # Without its files, Transformers makes a tokenizer of special tokens alone from config.json.
            if not files or any((folder / name).is_file() for name in files):
                return tokenizer
    except Exception as error:
        raise ConfigError(
            f"the tokenizer in {path} cannot be read",
            found=str(error),
            hint="set model.tokenizer_path to a folder that Transformers' AutoTokenizer loads",
        ) from error
    raise ConfigError(
        f"no tokenizer at {path}",
        found=f"none of {', '.join(sorted(files))}" if files else "",
        hint="set model.tokenizer_path to a folder with tokenizer.json (and tokenizer_config.json)",
    )
