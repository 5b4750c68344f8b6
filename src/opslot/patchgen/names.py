"""Names of architectures, and of the modules that define them."""

from __future__ import annotations

import re

PACKAGE = "transformers"

# Architectures in the folder of another one, or in one of several.
_FOLDERS = {
    "blip_text": "blip",
    "data2vec_audio": "data2vec",
    "data2vec_text": "data2vec",
    "data2vec_vision": "data2vec",
    "donut_swin": "donut",
    "maskformer_swin": "maskformer",
}


# Of the names of architectures outside Transformers. No folder under `transformers/models` begins so.
_ELSEWHERE = "from__"
# Underscores that `__` for a dot would make ambiguous.
_AMBIGUOUS = re.compile(r"(?<![^._])_|_(?=[._]|5f|$)")


def modeling_module(arch: str) -> str:
    """The module that defines an architecture: in Transformers that of its folder, but for a few.

    The inverse of `architecture_in` and of `architecture_from`.
    """
    if arch.startswith(_ELSEWHERE):
        return arch.removeprefix(_ELSEWHERE).replace("__", ".").replace("_5f", "_")
    return f"{PACKAGE}.models.{_FOLDERS.get(arch, arch)}.modeling_{arch}"


def architecture_in(module: str) -> str | None:
    """The architecture that a module of Transformers defines; None for other modules."""
    arch = module.rpartition(".modeling_")[2]
    return arch if module == modeling_module(arch) else None


def architecture_from(module: str) -> str:
    """The name of the architecture in any module: as `architecture_in`, else one that only that module has.

    `my_package.modeling_mine` is `from__my_package__modeling_mine`. Underscores next to others or to dots are `_5f`.
    """
    return architecture_in(module) or _ELSEWHERE + _AMBIGUOUS.sub("_5f", module).replace(".", "__")


def is_elsewhere(arch: str) -> bool:
    """Whether an architecture is in a module outside Transformers."""
    return arch.startswith(_ELSEWHERE)
