"""FlashAttention 4, with its compiled kernels kept on disk: compiling takes each process up to a minute without."""

from __future__ import annotations

import importlib
import os
from typing import Any

from opslot.patchgen.cache import cache_homes

_ENABLED, _FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


def load_interface() -> Any:
    """The module `flash_attn.cute.interface`, which reads at its import whether to cache compiled kernels.

    They go into opslot's cache, since the library's default folder is one in the temporary folder that anybody can
    make. The environment variables of the library take precedence.
    """
    defaults = {_ENABLED: "1", _FOLDER: str(cache_homes()[-1] / "flash_attention_4")}
    missing = {} if _ENABLED in os.environ else {n: value for n, value in defaults.items() if n not in os.environ}
    os.environ.update(missing)
    try:
        return importlib.import_module("flash_attn.cute.interface")
    finally:
        for name in missing:
            del os.environ[name]
