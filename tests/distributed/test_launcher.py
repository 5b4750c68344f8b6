"""Ranks exit when their launcher is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

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
    if rank == "1":
        exit_with_launcher()
    ready()
    if rank == "1":
        time.sleep(300)
state = init_parallel_state(device_type="cpu")
if case == "training":
    with fail_together():
        ready()
        time.sleep(300)
"""


# Like torchrun: sets the environment, hosts the store and starts two ranks of SCRIPT.
LAUNCHER = """
import fcntl, os, runpy, sys, time

script, case, folder, port = sys.argv[1:]
os.environ.update(TORCHELASTIC_RUN_ID="none", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
for rank in ("0", "1"):
    if os.fork() == 0:
        lock = open(f"{folder}/{rank}.lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        sys.argv[:] = [script, case, folder]
        runpy.run_path(script, run_name="__main__")
        sys.exit()
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", int(port), is_master=True, wait_for_workers=False)
time.sleep(300)
"""


@pytest.mark.parametrize("case", ["importing", "waiting", "training"])
def test_ranks_exit_when_their_launcher_is_killed(case: str, forks, free_port, tmp_path: Path) -> None:
    for name, source in {"script.py": SCRIPT, "launcher.py": LAUNCHER}.items():
        (tmp_path / name).write_text(source)
    arguments = [str(tmp_path / "script.py"), case, str(tmp_path), str(free_port())]
    run = forks.start(tmp_path / "launcher.py", *arguments)
    files = [tmp_path / "0", tmp_path / "1"]
    try:
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), 90)
        run.kill()
        run.wait(30)
        wait_until(lambda: all(is_unlocked(file.with_suffix(".lock")) for file in files), 60)
        assert f"rank 1 stops: torchrun (process {run.pid}) was killed" in run.read("stderr")
    finally:
        run.kill()
        kill_ranks(files)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_signal_ends_a_rank_that_waits_for_another(rank: str, forks, free_port, tmp_path: Path) -> None:
    """torch waited in C++, where Python's handlers do not run, so that torchrun killed the rank after 30 seconds."""
    script, port = tmp_path / "script.py", free_port()
    script.write_text(
        "import signal, sys\nfrom pathlib import Path\nfrom opslot.distributed import init_parallel_state\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nPath(sys.argv[1]).touch()\n"
        "init_parallel_state(device_type='cpu')\n"
    )
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if rank == "1" else None
    env = {"WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run = forks.start(script, str(tmp_path / "ready"), env=env)
    try:
        wait_until((tmp_path / "ready").exists, 90)
        client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        wait_until(lambda: client.add("opslot/started/0", 0) == 1, 90)
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait(20) == 7
    finally:
        run.kill()
        del store


def is_unlocked(path: Path) -> bool:
    """Whether the process that locked a file has exited."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("case", ["importing", "connecting", "waiting", "training"])
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
        # The output is closed when the last process that can write to it exits.
        output, _ = run.communicate(timeout=60)
    finally:
        run.kill()
        kill_ranks(files)
    if case in ("importing", "waiting"):
        assert f"rank 1 stops: torchrun (process {run.pid}) was killed" in output
    if case == "connecting":
        assert "rank 1 cannot connect to " in output


def wait_until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kill_ranks(files: list[Path]) -> None:
    for file in files:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
            os.kill(int(file.read_text()), signal.SIGKILL)


def test_processes_without_torchrun_are_not_watched(monkeypatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(launcher.threading, "Thread", None)
    launcher.exit_with_launcher.__wrapped__()
