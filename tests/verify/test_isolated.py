"""Processes beside this one: results, and what becomes of items that take theirs down, hang or spoil it."""

import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import pytest

from opslot._base.errors import KernelError
from opslot.verify.isolated import Lost, Processes

_calls = 0


@pytest.fixture(autouse=True)
def started_quickly(monkeypatch):
    """Processes begin as forks of one that holds nothing but their imports; elsewhere in the tests they are spawned."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["opslot.verify.isolated"])
    monkeypatch.setattr("opslot.verify.isolated.multiprocessing", SimpleNamespace(get_context=lambda _: context))


def work(item):
    """Says how many items its process had before, unless the item says what else to do."""
    global _calls
    _calls += 1
    if item == "die" or (item == "die second" and _calls > 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "hang":
        time.sleep(600)
    if item == "raise":
        raise ValueError("no such item")
    return f"{item} {_calls}"


def of_bad(result):
    return result.startswith("bad")


def test_a_process_lives_on_until_an_item_takes_it_down_or_spoils_it():
    with Processes(1) as processes:
        assert list(processes.run(work, ["a", "die second", "bad", "b"], of_bad)) == [
            ("a", "a 1"),
            ("bad", "bad 1"),
            ("b", "b 1"),
            # What ran before may have been at fault: it had another try, in a new process.
            ("die second", "die second 1"),
        ]
        assert list(processes.run(work, ["c"], of_bad)) == [("c", "c 2")], "they are there for the next batch"


def test_an_item_that_dies_or_hangs_or_raises_is_told_alone():
    with Processes(2) as processes:
        found = dict(processes.run(work, ["die", "a"], of_bad))
        assert found == {"die": Lost("died"), "a": "a 1"}
        results = processes.run(work, ["b", "hang"], of_bad, limit=5)
        assert next(results) == ("b", "b 2")
        [hanging] = [worker._process for worker in processes._busy]
        assert list(results) == [("hang", Lost("was not done after 5 s"))]
        assert not hanging.is_alive()
        with pytest.raises(KernelError, match="ValueError: no such item"):
            list(processes.run(work, ["raise"], of_bad))


def test_who_stops_listening_leaves_no_process_at_work():
    with Processes(2) as processes:
        results = processes.run(work, ["a", "hang"], of_bad)
        assert next(results) == ("a", "a 1")
        [hanging] = [worker._process for worker in processes._busy]
        results.close()
        assert not hanging.is_alive()
