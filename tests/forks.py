"""Python processes that start quickly: forks of one process that has already imported everything.

`Forks().start(script, *arguments, env=...)` starts a process that runs and exits as `python script *arguments` does,
but leaves its memory to the system: freeing what it shares with the process that forked takes 1.6 s of CPU time.
`Context(forks)` has the part of a multiprocessing context that `opslot.verify.isolated` uses.
Run as a script, this file is the process that forks.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn


class Fork:
    """One forked process, with the interface of a `subprocess.Popen` whose output goes to files."""

    def __init__(self, server: Connection, pid: int, output: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._output = output

    def poll(self) -> int | None:
        """Return the exit code, -n after signal n, or None while the process runs."""
        if self.returncode is None:
            self._server.send(self.pid)
            self.returncode = self._server.recv()
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the exit code; raise subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
            time.sleep(0.01)
        return self.returncode

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Wait for the process and return its stdout and stderr."""
        self.wait(timeout)
        return self.read("stdout"), self.read("stderr")

    def read(self, name: str) -> str:
        """Return what it has written to "stdout" or "stderr" so far."""
        return (self._output / name).read_text()

    def kill(self) -> None:
        """Send SIGKILL without waiting, as Popen does, so that all of several communicating processes can be killed."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Forks:
    """The process that forks. It starts no threads, since threads do not survive a fork."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._started = 0
        self._server = _connect()

    def start(
        self,
        script: str | Path,
        *arguments: str,
        env: dict[str, str] | None = None,
        connection: Connection | None = None,
    ) -> Fork:
        """Run a script with `env` added to the environment; the descriptor of `connection` is its last argument."""
        self._started += 1
        output = Path(self._folder.name, str(self._started))
        output.mkdir()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        self._server.send((str(script), arguments, environment, output, connection is not None))
        if connection is not None:
            reduction.send_handle(self._server, connection.fileno(), None)
        return Fork(self._server, self._server.recv(), output)

    def close(self) -> None:
        self._server.close()
        self._folder.cleanup()


class Context:
    """Starts processes of `opslot.verify.isolated` as forks."""

    Pipe = staticmethod(multiprocessing.Pipe)

    def __init__(self, forks: Forks) -> None:
        self._forks = forks

    def Process(self, target: Callable[[Connection], None], args: tuple[Connection], daemon: bool) -> _ContextProcess:
        return _ContextProcess(self._forks, f"{target.__module__}:{target.__name__}", *args)


class _ContextProcess:
    def __init__(self, forks: Forks, target: str, connection: Connection) -> None:
        script = Path(__file__).with_name("call_target.py")
        # Tensors in messages are sent with this key.
        key = multiprocessing.current_process().authkey.hex()
        # `pytest`, unlike `python -m pytest`, does not import tests from the repository's folder.
        path = json.dumps([str(Path(__file__).parents[1]), *sys.path])
        self._start = lambda: forks.start(script, target, path, key, connection=connection)

    def start(self) -> None:
        self._fork = self._start()

    def is_alive(self) -> bool:
        return self._fork.poll() is None

    def kill(self) -> None:
        self._fork.kill()

    def join(self) -> None:
        self._fork.wait(60)


def _connect() -> Connection:
    """Connect to the process that forks. The first pytest-xdist worker that needs it starts it for all of them."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or secrets.token_hex()
    path = Path(tempfile.gettempdir(), f"opslot-{run}")
    client = socket.socket(socket.AF_UNIX)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            client.connect(str(path))
        except OSError:
            _start_server(path)
            client.connect(str(path))
    return Connection(client.detach())


def _start_server(path: Path) -> None:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.set_inheritable(True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        # It may outlive this process, and exits after the last one that is connected to it.
        os.posix_spawn(sys.executable, [sys.executable, "-P", __file__, str(listener.fileno())], environment)


def _serve(listener: socket.socket) -> None:
    """Reply to a task with the pid of its fork, and to a pid with its exit code, until no client is left."""
    clients = [_accept(listener)]
    while clients:
        for ready in wait([listener, *clients]):
            if ready is listener:
                clients.append(_accept(listener))
                continue
            try:
                task = ready.recv()
            except (EOFError, OSError):
                clients.remove(ready)
                continue
            if isinstance(task, int):
                pid, status = os.waitpid(task, os.WNOHANG)
                ready.send(os.waitstatus_to_exitcode(status) if pid else None)
                continue
            script, arguments, environment, output, connected = task
            descriptor = reduction.recv_handle(ready) if connected else None
            pid = os.fork()
            if pid == 0:
                for inherited in (listener, *clients):
                    inherited.close()
                _become(script, arguments if descriptor is None else (*arguments, str(descriptor)), environment, output)
            if descriptor is not None:
                os.close(descriptor)
            ready.send(pid)


def _accept(listener: socket.socket) -> Connection:
    return Connection(listener.accept()[0].detach())


def _become(script: str, arguments: tuple[str, ...], environment: dict[str, str], output: Path) -> NoReturn:
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        with (output / name).open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [script, *arguments]
    code = _exit_code(script)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_code(script: str) -> int:
    """Run the script; print what it raises, as Python does."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    gc.disable()
    # Slow imports, but no modeling module that opslot has slots for: tests check which of them are imported.
    for name in (
        "transformers.modeling_utils",
        "opslot.distributed",
        "opslot.trainer.text",
        "opslot.verify.two_processes",
    ):
        importlib.import_module(name)
    # pyarrow imports pandas where it is installed, and PEFT imports bitsandbytes and Inductor.
    for name in ("jsonargparse", "pandas", "peft", "pytest", "rich.console", "torch.distributed.checkpoint"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Collecting garbage in a fork would copy what was imported.
    gc.freeze()
    gc.enable()

    listener = socket.socket(fileno=int(sys.argv[1]))
    path = Path(listener.getsockname())
    _serve(listener)
    for file in (path, path.with_suffix(".lock")):
        file.unlink(missing_ok=True)
