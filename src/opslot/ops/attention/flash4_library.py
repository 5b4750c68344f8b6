"""FlashAttention 4, with its compiled kernels kept on disk: compiling takes each process up to a minute without."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from opslot.patchgen.cache import cache_homes

_ENABLED, _FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


def load_interface() -> Any:
    """The module `flash_attn.cute.interface`, which reads at its import whether to cache compiled kernels.

    They go into opslot's cache, since the library's default folder is one in the temporary folder that anybody can
    make. The environment variables of the library take precedence.
    """
    defaults = {} if _ENABLED in os.environ else {_ENABLED: "1", _FOLDER: str(cache_homes()[-1] / "flash_attention_4")}
    with _environment({name: os.environ.get(name, value) for name, value in defaults.items()}):
        return importlib.import_module("flash_attn.cute.interface")


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
