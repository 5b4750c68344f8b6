"""Stop a run on SIGINT or SIGTERM after the current step."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class StopRequest:
    """Records the first SIGINT or SIGTERM; a second one ends the run immediately.

    Args:
        announce: called with the signal's name when it arrives.

    Attributes:
        signal: number of the first signal, or None.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.signal: int | None = None
        self._announce = announce

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the first SIGINT or SIGTERM is only recorded. Does nothing outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def remember(number: int, _frame: Any) -> None:
            self.signal = number
            signal.signal(number, previous[signal.Signals(number)])
            # Fails if the signal interrupted a write to the same stream.
            with contextlib.suppress(RuntimeError):
                self._announce(signal.Signals(number).name)

        try:
            for number in previous:
                signal.signal(number, remember)
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
