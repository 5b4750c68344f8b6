"""Seeding the random generators of a run, and saving their states as plain data."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from opslot._base.errors import CheckpointError


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (users' code draws from it)
    torch.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """States of Python's, NumPy's and torch's generators, as plain data."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002  (users' code draws from it)
    states: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Set the generators to what `random_states` returned.

    Raises:
        CheckpointError: `states` is something else.
    """
    try:
        _restore(states)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(
            "the random states in the checkpoint are not what opslot wrote",
            found=f"{type(error).__name__}: {error}",
            hint="resume from another checkpoint",
        ) from error


def _restore(states: dict[str, Any]) -> None:
    def bytes_of(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(bytes_of(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(bytes_of(states["cuda"]))
