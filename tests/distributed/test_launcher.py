"""Ranks exit when their launcher is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opslot._base import launcher

SCRIPT = """
import os, sys, time
from pathlib import Path
from opslot._base.launcher import exit_with_launcher

case, folder = sys.argv[1], Path(sys.argv[2])
if case == "importing":
    exit_with_launcher()
from opslot.distributed import fail_together, init_parallel_state

rank = os.environ["RANK"]

def ready():
    (folder / rank).write_text(str(os.getpid()))

if case == "importing":
    ready()
    time.sleep(300)
if case == "connecting":
    ready()
    while not (folder / "killed").exists():
        time.sleep(0.05)
if case == "waiting":
    ready()
    if rank == "1":
        exit_with_launcher()
        time.sleep(300)
state = init_parallel_state(device_type="cpu")
if case == "training":
    with fail_together():
        ready()
        time.sleep(300)
"""


def slow(case: str):
    return pytest.param(case, marks=pytest.mark.slow)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX processes")
@pytest.mark.parametrize("case", ["importing", slow("connecting"), "waiting", slow("training")])
def test_ranks_exit_when_torchrun_is_killed(case: str, tmp_path: Path, free_port) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    arguments = [str(free_port()), str(script), case, str(tmp_path)]
    run = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    files = [tmp_path / "0", tmp_path / "1"]
    try:
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), 90)
        time.sleep(1)
        run.kill()
        run.wait()
        (tmp_path / "killed").touch()
        killed = time.monotonic()
        # The output is closed when the last process that can write to it exits.
        output, _ = run.communicate(timeout=30)
        assert time.monotonic() - killed < 20
    finally:
        run.kill()
        for file in files:
            if file.exists():
                kill_if_alive(int(file.read_text()))
    if case in ("importing", "waiting"):
        assert f"rank 1 stops: torchrun (process {run.pid}) was killed" in output
    if case == "connecting":
        assert "rank 1 cannot connect to " in output


def wait_until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kill_if_alive(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_processes_without_torchrun_are_not_watched(monkeypatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(launcher.threading, "Thread", None)
    launcher.exit_with_launcher.__wrapped__()
