"""Python processes that start quickly: forks of one process that has already imported everything.

`Forks().start(script, *arguments, env=...)` starts a process that runs and exits as `python script *arguments` does,
but leaves its memory to the system: freeing what it shares with the process that forked takes 1.6 s of CPU time.
`Context(forks)` has the part of a multiprocessing context that `opslot.verify.isolated` uses.
Run as a script, this file is the process that forks. With `-u -c code`, as execnet starts the workers of pytest-xdist,
it is a process that waits for a fork which runs the code.
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
import shlex
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
from types import ModuleType
from typing import Any, NoReturn

# Names this run: its processes share the process that forks.
_RUN = "OPSLOT_TEST_RUN"
# Set in workers of pytest-xdist that are forks.
_IS_FORK = "OPSLOT_TEST_WORKER_IS_FORK"


class Fork:
    """One forked process, with the interface of a `subprocess.Popen` whose output goes to files."""

    def __init__(self, server: Connection, pid: int, output: Path | None = None) -> None:
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
        assert self._output is not None
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
        self._server.send((str(script), arguments, environment, output, 0 if connection is None else 1))
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


def start_workers_as_forks(specs: list[Any]) -> None:
    """Let the workers of execnet specifications be forks, of one process for all of them and for their tests."""
    os.environ[_RUN] = secrets.token_hex()
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = shlex.join([sys.executable, "-P", __file__])


def _wait_for_worker(code: str) -> NoReturn:
    """Exit as a fork does that runs `code` with the standard streams of this process."""
    server = _connect()
    server.send((code, dict(os.environ), os.getcwd()))
    if not server.recv():
        os.execv(sys.executable, [sys.executable, "-u", "-c", code])
    ended, held = os.pipe()
    for descriptor in (0, 1, 2, held):
        reduction.send_handle(server, descriptor, None)
    fork = Fork(server, server.recv())
    os.close(held)
    os.read(ended, 1)
    os._exit(fork.wait(60) & 0xFF)


def _connect() -> Connection:
    """Connect to the process that forks. The first worker of pytest-xdist starts it for all of them."""
    run = os.environ.get(_RUN) or secrets.token_hex()
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


def _serve(listener: socket.socket, can_fork_workers: bool) -> None:
    """Reply to a task with the pid of its fork, and to a pid with its exit code, until no client is left."""
    clients = [_accept(listener)]
    workers: dict[Connection, int] = {}
    while clients:
        for ready in wait([listener, *clients]):
            if ready is listener:
                clients.append(_accept(listener))
                continue
            try:
                task = ready.recv()
            except (EOFError, OSError):
                clients.remove(ready)
                # The process that waits for this worker was killed.
                if ready in workers:
                    os.kill(workers.pop(ready), signal.SIGKILL)
                continue
            if isinstance(task, int):
                pid, status = os.waitpid(task, os.WNOHANG)
                ready.send(os.waitstatus_to_exitcode(status) if pid else None)
                if pid:
                    workers.pop(ready, None)
                continue
            is_worker = len(task) == 3
            if is_worker:
                ready.send(can_fork_workers)
                if not can_fork_workers:
                    continue
            descriptors = [reduction.recv_handle(ready) for _ in range(4 if is_worker else task[-1])]
            pid = os.fork()
            if pid == 0:
                for inherited in (listener, *clients):
                    inherited.close()
                if is_worker:
                    _become_worker(*task, descriptors)
                _become(*task[:-1], descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            if is_worker:
                workers[ready] = pid
            ready.send(pid)


def _accept(listener: socket.socket) -> Connection:
    return Connection(listener.accept()[0].detach())


def _become(
    script: str, arguments: tuple[str, ...], environment: dict[str, str], output: Path, descriptors: list[int]
) -> NoReturn:
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        with (output / name).open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [script, *arguments, *map(str, descriptors)]
    _exit(_exit_code(lambda: runpy.run_path(script, run_name="__main__")))


def _become_worker(code: str, environment: dict[str, str], folder: str, descriptors: list[int]) -> NoReturn:
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment, **{_IS_FORK: "1"})
    os.chdir(folder)
    sys.argv[:] = ["-c"]
    main = sys.modules["__main__"] = ModuleType("__main__")
    _exit(_exit_code(lambda: exec(code, vars(main))))


def _exit(code: int) -> NoReturn:
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_code(run: Callable[[], object]) -> int:
    """Run a program; print what it raises, as Python does."""
    try:
        run()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _import_slowly() -> bool:
    """Import what tests need but no modeling module that opslot has slots for: tests check which of them are imported.

    Returns whether workers of pytest-xdist can be forks.
    """
    gc.disable()
    torch = importlib.import_module("torch")
    can_fork_workers = not torch.cuda.is_available()
    # Triton reads it on import.
    if can_fork_workers:
        os.environ["TRITON_INTERPRET"] = "1"
    for name in (
        "transformers.modeling_utils",
        "opslot.distributed",
        "opslot.bench.run",
        "opslot.patchgen.engine",
        "opslot.trainer.text",
        "opslot.verify.two_processes",
    ):
        importlib.import_module(name)
    # pyarrow imports pandas where it is installed, and PEFT imports bitsandbytes and Inductor.
    for name in (
        "hypothesis",
        "jsonargparse",
        "pandas",
        "peft",
        "pytest",
        "rich.console",
        "torch._decomp.decompositions_for_jvp",
        "torch.distributed.checkpoint",
        "trl",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Collecting garbage in a fork would copy what was imported.
    gc.freeze()
    gc.enable()
    return can_fork_workers


if __name__ == "__main__" and sys.argv[1] == "-u":
    _wait_for_worker(sys.argv[-1])
elif __name__ == "__main__":
    can_fork_workers = _import_slowly()
    listener = socket.socket(fileno=int(sys.argv[1]))
    path = Path(listener.getsockname())
    _serve(listener, can_fork_workers)
    for file in (path, path.with_suffix(".lock")):
        file.unlink(missing_ok=True)
    # Extension modules report what is left as leaked.
    os._exit(0)
