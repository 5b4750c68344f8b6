"""Processes that tokenize ahead of training."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Protocol

from opslot._base.errors import DataError
from opslot._base.host_memory import keep_freed_memory


class Shards(Protocol):
    """A corpus whose shards can be tokenized ahead, such as `TokenCorpus`."""

    def prepare(self, numbers: Sequence[int], check: Callable[[], None] | None = None) -> None: ...


class TokenizingProcesses:
    """`count` processes that tokenize the shards `numbers` of a corpus, in this order; they end with their parent."""

    def __init__(self, corpus: Shards, numbers: Sequence[int], count: int) -> None:
        context = multiprocessing.get_context()
        self._members = []
        for _ in range(count):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_tokenize, args=(corpus, numbers, sender), daemon=True)
            process.start()
            sender.close()
            self._members.append((process, receiver))

    def check(self) -> None:
        """Raise the error of a process that failed.

        Raises:
            DataError: the process's own error, or how it ended. SIGTERM is not an error; training takes over.
        """
        for process, receiver in self._members:
            code = process.exitcode
            if code in (None, 0, -signal.SIGTERM):
                continue
            with contextlib.suppress(EOFError):
                raise DataError(receiver.recv())
            how = f"signal {-code}; out of memory?" if code < 0 else f"exit code {code}, see above"
            raise DataError(
                f"a tokenizing process exited ({how})",
                hint="lower data.num_workers, and continue with train.checkpoint.resume_from: latest",
            )

    def stop(self) -> None:
        """Terminate the processes."""
        for process, receiver in self._members:
            process.terminate()
            process.join()
            receiver.close()


def _tokenize(corpus: Shards, numbers: Sequence[int], errors: Connection) -> None:
    # Ctrl-C reaches every process of a terminal; only the training process handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    keep_freed_memory()
    import torch

    # One thread per process; threads of the parent do not exist after a fork, and OpenMP would wait for them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        if parent is not None and not parent.is_alive():
            os._exit(0)

    try:
        corpus.prepare(numbers, end_with_parent)
    except DataError as error:
        errors.send(str(error))
        sys.exit(1)
