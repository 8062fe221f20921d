"""Pages that lie at home in another form: coded when stored, decoded when loaded.

What crosses the link and what the home takes are the coded bytes; frames hold the decoded ones.
Engines and books count a page's bytes on the device and its bytes at home (``Page.num_bytes``,
``Page.home_bytes``); only this home knows that the two are not the same bytes.

A page is coded slice by slice, each into an image of its own, one behind the other. So transfers of
coded pages are sliced where all others are, and a demand overtakes them as soon. An image passes
through a buffer of the thread that moves it: it is read as it lies at home, in whole blocks where
that is a disk, and decoded into the frames.

The codec is the caller's and must be exact about its own values: what was decoded and is coded
again decodes to the same bytes. Then it makes no difference whether a page has been at home.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from odc.memory.engines.base import SLICE_BYTES
from odc.memory.events import Tier
from odc.memory.home import Home
from odc.memory.pages import Page, PageTable


class RangeCodec(Protocol):
    """The form in which the parameters of one group lie at home.

    ``begin`` and ``end`` are bytes of the group's range on the device; they are multiples of
    2 MiB, or the end of the range. Called from several threads at once, for different bytes.
    """

    def stored_bytes(self, begin: int, end: int) -> int:
        """Size of the image of these bytes."""

    def encode(self, begin: int, end: int, image: memoryview) -> None:
        """Write the image of these bytes, which are in frames."""

    def decode(self, begin: int, end: int, image: memoryview) -> None:
        """Give these bytes, whose frames are there, the values of an image."""


def slices_of(begin: int, end: int) -> list[tuple[int, int]]:
    """The slices of a page that spans these bytes of its range."""
    return [(at, min(at + SLICE_BYTES, end)) for at in range(begin, end, SLICE_BYTES)]


def image_bytes(codec: RangeCodec, begin: int, end: int, block_bytes: int) -> int:
    """Bytes at home of a slice, filled up to whole blocks."""
    return -(-codec.stored_bytes(begin, end) // block_bytes) * block_bytes


def page_bytes(codec: RangeCodec, begin: int, end: int, block_bytes: int) -> int:
    """Bytes at home of a page that spans these bytes of its range."""
    return sum(image_bytes(codec, *piece, block_bytes) for piece in slices_of(begin, end))


@dataclass(frozen=True, slots=True)
class _Image:
    """One slice of a coded page: its bytes in the range, and where its image lies at home."""

    codec: RangeCodec
    begin: int
    end: int
    offset: int
    num_bytes: int


class CodedHome:
    """A home in which some pages are coded.

    Args:
        home: where the images go, and all other pages as they are.
        table: sealed.
        codecs: of the groups that have one.
        block_bytes: images fill whole blocks of it.
    """

    def __init__(
        self, home: Home, table: PageTable, codecs: Mapping[int, RangeCodec], block_bytes: int
    ) -> None:
        self.home = home
        self.tiers = home.tiers
        self.traffic = home.traffic  # of coded pages the coded bytes
        self._images: dict[int, tuple[int, list[_Image]]] = {}  # page -> its offset, its slices
        for page in table.pages:
            if page.group in codecs:
                codec = codecs[page.group]
                self._images[page.page] = (page.offset, _images(table, page, codec, block_bytes))
        every = [image.num_bytes for _, images in self._images.values() for image in images]
        self._largest = max(every, default=1)
        self._own = threading.local()

    @property
    def used_bytes(self) -> int:
        """Host memory that is taken."""
        return self.home.used_bytes

    def tier_of(self, page: int) -> Tier:
        """Where a page lives."""
        return self.home.tier_of(page)

    def load(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        """Load a slice; ``offset`` is the page's, plus the bytes of the page before the slice."""
        image = self._image(page, offset)
        if image is None:
            self.home.load(page, offset, address, num_bytes)
            return
        buffer = self._buffer()
        self.home.load(page, image.offset, ctypes.addressof(buffer), image.num_bytes)
        image.codec.decode(image.begin, image.end, memoryview(buffer).cast("B"))

    def store(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        """Store a slice; ``offset`` is the page's, plus the bytes of the page before the slice."""
        image = self._image(page, offset)
        if image is None:
            self.home.store(page, offset, address, num_bytes)
            return
        buffer = self._buffer()
        image.codec.encode(image.begin, image.end, memoryview(buffer).cast("B"))
        self.home.store(page, image.offset, ctypes.addressof(buffer), image.num_bytes)

    def address(self, page: int, offset: int) -> int:
        """Where a place of the home lies in memory; 0 if it does not, or if the page is coded."""
        return 0 if page in self._images else self.home.address(page, offset)

    def read(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        """Read a page that is not coded, where nothing goes to the device."""
        self._check_plain(page)
        self.home.read(page, offset, address, num_bytes)

    def write(self, page: int, offset: int, address: int, num_bytes: int) -> None:
        """Write a page that is not coded, where nothing comes from the device."""
        self._check_plain(page)
        self.home.write(page, offset, address, num_bytes)

    def _check_plain(self, page: int) -> None:
        assert page not in self._images, f"page {page} is coded: only frozen parameters are"

    def _image(self, page: int, offset: int) -> _Image | None:
        """The slice of a coded page that begins at ``offset``."""
        found = self._images.get(page)
        if found is None:
            return None
        number, rest = divmod(offset - found[0], SLICE_BYTES)
        assert rest == 0, f"page {page} is coded in slices of {SLICE_BYTES} bytes, {rest} into one"
        return found[1][number]

    def _buffer(self) -> ctypes.Array[ctypes.c_uint8]:
        """This thread's buffer for images, at the beginning of a block."""
        buffer: ctypes.Array[ctypes.c_uint8] | None = getattr(self._own, "buffer", None)
        if buffer is None:
            buffer = (ctypes.c_uint8 * self._largest).from_buffer(mmap.mmap(-1, self._largest))
            self._own.buffer = buffer
        return buffer

    def close(self) -> None:
        self.home.close()


def _images(table: PageTable, page: Page, codec: RangeCodec, block_bytes: int) -> list[_Image]:
    images, offset = [], page.offset
    for begin, end in slices_of(*table.span_of(page)):
        size = image_bytes(codec, begin, end, block_bytes)
        images.append(_Image(codec, begin, end, offset, size))
        offset += size
    assert offset == page.offset + page.home_bytes, f"page {page.page}: {offset - page.offset}"
    return images
