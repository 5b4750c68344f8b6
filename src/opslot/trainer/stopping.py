"""Stop a run on SIGINT or SIGTERM: after the current step, or at once before the first one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class StoppedBeforeTraining(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived before training started.

    Attributes:
        signal: its number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


class _Stop:
    """A signal handler.

    Attributes:
        before: the handlers before it.
    """

    def __init__(self, before: dict[signal.Signals, Any]) -> None:
        self.before = before

    def __call__(self, number: int, _frame: Any) -> None:
        raise StoppedBeforeTraining(number)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise StoppedBeforeTraining, until a StopRequest listens.

    Does nothing outside of the main thread.
    """
    with _handled_by(_Stop(_handlers())):
        yield


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Inside, `handler` gets the signals. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = _handlers()
    try:
        for number in previous:
            signal.signal(number, handler)
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def _handlers() -> dict[signal.Signals, Any]:
    """Those before `stopped_by_signals`, whose own must not stay after training has started."""
    found: dict[signal.Signals, Any] = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    return {n: handler.before[n] if isinstance(handler, _Stop) else handler for n, handler in found.items()}


class StopRequest:
    """Records the first SIGINT or SIGTERM; a second one ends the run immediately.

    Args:
        report: prints a line for the user.

    Attributes:
        signal: number of the first signal, or None.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self.signal: int | None = None
        self._report = report

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the first SIGINT or SIGTERM is only recorded. Does nothing outside of the main thread."""
        previous = _handlers()

        def remember(number: int, _frame: Any) -> None:
            self.signal = number
            signal.signal(number, previous[signal.Signals(number)])
            name = signal.Signals(number).name
            # Fails if the signal interrupted a write to the same stream.
            with contextlib.suppress(RuntimeError):
                self._report(f"{name}: stopping after the current step and saving; send it again to stop immediately")

        with _handled_by(remember):
            yield
