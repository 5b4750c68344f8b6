"""Atomic file writes: readers never see a partial file."""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, and rename it to `path` at the end; on an error `path` is unchanged.

    Several processes, on several machines, may write the same file: the last to finish wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{uuid.uuid4().hex}.{path.name}")
    try:
        yield beside
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def remove_temporary_files(folder: Path) -> None:
    """Remove files that `replacing` left in `folder` when its process was killed; no process may be writing there."""
    for path in folder.glob(".*"):
        if re.fullmatch(r"\.[0-9a-f]{32}\..+", path.name) and path.is_file():
            path.unlink(missing_ok=True)


def path_problem(text: str) -> str | None:
    """Why no file can have the path `text`: an unknown user after "~", a NUL character, a name that is too long."""
    try:
        Path(text).expanduser().stat()
    except RuntimeError:
        return f"{text.split('/')[0]!r} is not a user's home folder"
    except FileNotFoundError:
        return None
    except ValueError as error:
        return f"{text!r} is not a path ({error})"
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return f"{text[:40]}... is not a path ({error.strerror})"
    return None


def missing_path_hint(path: str) -> str:
    """For a missing path: the entry of its folder with the nearest name, else where relative paths start."""
    wanted = Path(path).expanduser()
    try:
        names = os.listdir(wanted.parent)
    except OSError:
        names = []
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(wanted.name.lower(), by_lower, 1, cutoff=0.75)
    return f"did you mean {wanted.parent / by_lower[near[0]]}?" if near else f"relative paths start at {Path.cwd()}"


_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# Whole, or one of several shards. Some models call their usual shards "model.safetensors-00001-of-00002.safetensors".
_VARIANT = re.compile(r"model\.(?!safetensors)(?P<name>[^.]+?)(-\d+-of-\d+)?\.safetensors")


def variant_of(name: str) -> str | None:
    """Which variant of the weights a file has, such as "fp16" of model.fp16.safetensors; None for other files."""
    found = _VARIANT.fullmatch(name)
    return found and found["name"]


def weights_in_other_formats(names: Sequence[str], model: str) -> tuple[str, str]:
    """What is found, and what to do, where a model has weights, but no model.safetensors.

    Args:
        names: of its files.
        model: what Transformers takes to load it.
    """
    variants = {name: variant for name in names if (variant := variant_of(name))}
    if variants:
        options = f"{model!r}, variant={next(iter(variants.values()))!r}"
        return (
            f"only variants of the weights: {', '.join([*variants][:3])}",
            f"save one without a name: AutoModelForCausalLM.from_pretrained({options}).save_pretrained('new_folder')",
        )
    pickles = [name for name in names if name.endswith(_PICKLES) and name != "training_args.bin"]
    if pickles:
        return (
            f"{', '.join(pickles[:3])}; pickled weights can run code, so opslot does not open them",
            f"convert them once: AutoModelForCausalLM.from_pretrained({model!r}).save_pretrained('new_folder')",
        )
    hint = "give a Hugging Face checkpoint with model.safetensors"
    if any(name.endswith(".gguf") for name in names):
        hint += "; GGUF files are for inference: give the model that they were made from"
    elif any(Path(name).name.startswith("consolidated") for name in names):
        hint += "; consolidated files have the names of the model's own library"
    return ", ".join(names[:8]) or "nothing", hint


def write_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8 atomically, also with respect to a power failure."""
    with replacing(path) as beside, beside.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if it is missing, not readable or holds something else."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: Any) -> None:
    """`write_text` of indented JSON."""
    write_text(path, json.dumps(value, indent=1) + "\n")
