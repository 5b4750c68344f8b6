"""Assertion rewriting of the test files, shared by the pytest-xdist workers.

Each worker imports every test file, and all start at the same time: without a cache from an earlier run, each of them
would rewrite all files, for 5 s of CPU time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def cache_share(config: pytest.Config, worker: int, workers: int) -> None:
    """Write pytest's cache of one file in `workers` of the folder of this file, as importing it would."""
    state = config.stash[rewrite.assertstate_key]
    for path in sorted(Path(__file__).parent.rglob("test_*.py"))[worker::workers]:
        folder = rewrite.get_cache_dir(path)
        cached = folder / (path.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(path, cached) is None and rewrite.try_makedirs(folder):
            source, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, source, cached)
