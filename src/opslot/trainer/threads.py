"""How torch's CPU threads wait."""

from __future__ import annotations

import os
import sys


def wait_without_spinning() -> None:
    """Let idle OpenMP threads sleep; call it before torch is imported, later it does nothing.

    OpenMP's default is to spin for milliseconds at the end of each parallel loop. Where another process also wants a
    core, a spinning thread keeps the one it waits for from running: with one busy neighbour on two cores, the demo's
    step was measured 10 to 30 times slower. A user's own OMP_WAIT_POLICY stands.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
