"""Pages at home as memory: in place where they lie in host memory, staged where they lie on disk.

What is updated at home is worked on here, and moments that never leave it are read here. A staging
buffer takes direct I/O as it is, and is as large as the pages that are staged together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from types import TracebackType

from odc.memory.frames import FRAME_BYTES, PROT_RW, map_anonymous, unmap
from odc.memory.home import Home
from odc.memory.pages import Page

Buffer = ctypes.Array[ctypes.c_uint8]


class Staging:
    """Memory for pages from disk, one place for each of the pages that are used together.

    Args:
        place_bytes: the largest page at each place.
    """

    def __init__(self, place_bytes: Sequence[int]) -> None:
        sizes = [-(-size // FRAME_BYTES) * FRAME_BYTES for size in place_bytes]
        self._offsets = [sum(sizes[:place]) for place in range(len(sizes))]
        self.num_bytes = max(sum(sizes), FRAME_BYTES)
        self._base = map_anonymous(self.num_bytes, PROT_RW)  # faulted in where it is used

    def address(self, place: int) -> int:
        """Where a place begins."""
        return self._base + self._offsets[place]

    def close(self) -> None:
        if self._base:
            unmap(self._base, self.num_bytes)
            self._base = 0


class StagedPages:
    """Pages at home by address: their own in host memory, else places of a staging buffer.

    The addresses of a set of pages are the same every time.

    Args:
        home: where they live.
        staging: for those on disk.
        pages: a page for each place; None leaves it free.
    """

    def __init__(self, home: Home, staging: Staging, pages: Sequence[Page | None]) -> None:
        self._home = home
        self.pages = pages
        self.addresses: list[int] = []
        self._staged: list[bool] = []
        for place, page in enumerate(pages):
            own = 0 if page is None else home.address(page.page, page.offset)
            self._staged.append(page is not None and not own)
            self.addresses.append(own or staging.address(place))

    def read(self, places: Iterable[int]) -> None:
        """Read what lies on disk."""
        for place in places:
            self._move(self._home.read, place)

    def write(self, places: Iterable[int]) -> None:
        """Write back what lies on disk."""
        for place in places:
            self._move(self._home.write, place)

    def _move(self, move, place: int) -> None:  # type: ignore[no-untyped-def]
        page = self.pages[place]
        if page is not None and self._staged[place]:
            move(page.page, page.offset, self.addresses[place], page.num_bytes)


class HomeRange:
    """A whole range at home, as one buffer.

    Args:
        home: where its pages live.
        pages: of one range, in order.
    """

    def __init__(self, home: Home, pages: Sequence[Page]) -> None:
        self._home = home
        self._pages = pages
        first = pages[0]
        own = [home.address(p.page, p.offset) for p in pages]
        span = pages[-1].offset - first.offset + pages[-1].num_bytes
        in_place = all(
            place and place - own[0] == p.offset - first.offset
            for place, p in zip(own, pages, strict=True)
        )
        self._staging = None if in_place else Staging([span])
        self._base = own[0] if self._staging is None else self._staging.address(0)
        self.buffer = (ctypes.c_uint8 * span).from_address(self._base)

    def __enter__(self) -> HomeRange:
        try:
            self._move(self._home.read)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def write_back(self) -> None:
        """Write the buffer home."""
        self._move(self._home.write)

    def _move(self, move) -> None:  # type: ignore[no-untyped-def]
        if self._staging is None:
            return
        for page in self._pages:
            move(
                page.page,
                page.offset,
                self._base + page.offset - self._pages[0].offset,
                page.num_bytes,
            )

    def _close(self) -> None:
        if self._staging is not None:
            self._staging.close()
            self._staging = None
