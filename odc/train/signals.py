"""How a run is asked to stop."""

import signal
import threading
from types import FrameType
from typing import Any


class Signals:
    """SIGINT and SIGTERM end a run after its current step; a second one ends it at once."""

    def __init__(self) -> None:
        self.received = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        # Python delivers signals to the main thread only, and lets only that install handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = True
