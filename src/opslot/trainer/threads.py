"""Wait policy of torch's CPU threads."""

from __future__ import annotations

import os
import sys


def wait_without_spinning() -> None:
    """Let idle OpenMP threads sleep; has no effect after torch is imported.

    OpenMP's default is to spin for milliseconds at the end of each parallel loop. Where another process also needs a
    core, a spinning thread keeps the one it waits for from running: with one busy neighbor on two cores, the demo's
    step was measured 10 to 30 times slower. OMP_WAIT_POLICY is kept if the user has set it.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
