"""Worker processes: results, and items that kill their process, hang or make it unusable."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from opslot._base.errors import KernelError
from opslot.verify.isolated import Lost, Processes

_calls = 0


pytestmark = pytest.mark.usefixtures("forked_workers")


def work(item):
    """Return the item and the number of items that this process has run, unless the item requests a failure."""
    global _calls
    _calls += 1
    if item == "die" or (item == "die second" and _calls > 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "hang":
        time.sleep(600)
    if item == "raise":
        raise ValueError("no such item")
    return f"{item} {_calls}"


def is_bad(result):
    return result.startswith("bad")


def test_process_is_reused_until_an_item_kills_or_spoils_it():
    with Processes(1) as processes:
        assert list(processes.run(work, ["a", "die second", "bad", "b"], is_bad)) == [
            ("a", "a 1"),
            ("bad", "bad 1"),
            ("b", "b 1"),
            # An earlier item may be the cause, so it runs again in a new process.
            ("die second", "die second 1"),
        ]
        assert list(processes.run(work, ["c"], is_bad)) == [("c", "c 2")], "processes are kept for the next batch"


def test_worker_imports_a_test_without_the_current_folder_on_the_path(monkeypatch):
    root = str(Path(__file__).parents[2])
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", root)])
    with Processes(1) as processes:
        assert list(processes.run(work, ["a"], is_bad)) == [("a", "a 1")]


def test_item_that_exits_hangs_or_raises_is_reported():
    with Processes(2) as processes:
        found = dict(processes.run(work, ["die", "a"], is_bad))
        assert found == {"die": Lost("exited"), "a": "a 1"}
        results = processes.run(work, ["b", "hang"], is_bad, limit=2)
        assert next(results) == ("b", "b 2")
        [hanging] = [worker._process for worker in processes._busy]
        assert list(results) == [("hang", Lost("was not done after 2 s"))]
        assert not hanging.is_alive()
        with pytest.raises(KernelError, match="ValueError: no such item"):
            list(processes.run(work, ["raise"], is_bad))


def test_closing_the_results_stops_the_processes():
    with Processes(2) as processes:
        results = processes.run(work, ["a", "hang"], is_bad)
        assert next(results) == ("a", "a 1")
        [hanging] = [worker._process for worker in processes._busy]
        results.close()
        assert not hanging.is_alive()
