"""Frozen parameters in 8 or 4 bits at home: blocks of 64 values that share a scale.

A block is stored as one bf16 number A, the largest magnitude in it, and 64 signed integers q. A
value is q * step with step = A / 127 (int8) or A / 7 (int4), computed in fp32 and rounded to the
parameter's type. Integers are chosen by rounding to nearest, so that a value is off by at most half
a step before it is rounded to its type. Two 4-bit integers share a byte: the first half of a piece
has the low ones. That makes 8.25 and 4.25 bits a value.

Only matrices (two dimensions or more, in float32, bfloat16 or float16) are stored so; norms, biases
and other vectors stay as they are. Blocks begin with their parameter and no page border cuts them,
so that values do not depend on the size of pages.

[Note: values that come back] A is rounded to nearest, never so far that the largest value gets
another integer than 127 or 7 (bf16 has 8 significant bits, and 127 * 2**-8 < 1/2). So the block of
the decoded values has the same A and the same integers: coding once more changes nothing, and
whatever is written is rounded at once to what a load would give (``round_values``). What a
computation reads does not depend on when a page was loaded.

Blocks with a scale of their own are those of LLM.int8 and QLoRA (Dettmers et al., 2022 and 2023);
integers are evenly spaced here, and A is not quantized a second time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from odc.errors import ConfigError, QuantizationError
from odc.memory.coded import slices_of

if TYPE_CHECKING:
    from odc.fsdp.group import Slot

BLOCK = 64  # values
FORMATS = ("native", "int8", "int4")
_LEVELS = {8: 127, 4: 7}
_ABSMAX = torch.bfloat16
_CODED = (torch.float32, torch.bfloat16, torch.float16)
_LEAST = 2.0**-119  # of A: no step is subnormal, so that none is flushed to zero
_CHUNK = 1 << 14  # blocks that are computed at a time: what is in between stays in the cache


def is_coded(shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether a frozen parameter is stored in blocks."""
    return len(shape) >= 2 and dtype in _CODED


def _most(dtype: torch.dtype) -> float:
    """The largest A: the largest bf16 number that is also one of ``dtype``."""
    return 65280.0 if dtype == torch.float16 else float(torch.finfo(_ABSMAX).max)


class _Scratch(threading.local):
    """Memory of a thread for what lies between two forms; it grows to what was needed."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def take(self, use: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        held = self._held.get(use)
        if held is None or held.numel() < numel:
            held = self._held[use] = torch.empty(numel, dtype=dtype)
        return held[:numel]


class BlockFormat:
    """Blocks of 8 or 4 bits, for all groups of a model.

    Args:
        bits: of a value.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.levels = _LEVELS[bits]
        self.name = f"int{bits}"
        self.scratch = _Scratch()

    @staticmethod
    def of(name: str) -> BlockFormat | None:
        """The format called ``name``; None for ``native``.

        Raises:
            ConfigError: there is none.
        """
        if name not in FORMATS:
            raise ConfigError(f"frozen_format must be native, int8 or int4, got {name!r}")
        return None if name == "native" else BlockFormat(int(name.removeprefix("int")))

    def sizes(self, num_blocks: int) -> tuple[int, int]:
        """Bytes of the integers of blocks, and of their largest magnitudes."""
        return num_blocks * BLOCK * self.bits // 8, num_blocks * _ABSMAX.itemsize

    def encode(self, values: torch.Tensor, image: torch.Tensor) -> None:
        """Code blocks.

        Args:
            values: (num_blocks, 64).
            image: (bytes of integers and magnitudes,) uint8, written.

        Raises:
            QuantizationError: a value is NaN or infinite.
        """
        coded, magnitudes = image.split(self.sizes(len(values)))
        absmax = magnitudes.view(_ABSMAX)
        integers = coded.view(torch.int8)
        if self.bits == 4:
            integers = self.scratch.take("integers", torch.int8, values.numel())
        for chunk, into, most in zip(
            values.split(_CHUNK),
            integers.view(-1, BLOCK).split(_CHUNK),
            absmax.split(_CHUNK),
            strict=True,
        ):
            work = self.scratch.take("work", torch.float32, chunk.numel()).view(-1, BLOCK)
            wide = chunk.to(torch.float32)
            largest = torch.abs(wide, out=work).amax(1)  # 17 times as fast as its norm
            if not bool(torch.isfinite(largest).all()):
                raise QuantizationError("a value is NaN or infinite")
            most.copy_(largest).clamp_(_LEAST, _most(values.dtype))
            step = most.to(torch.float32).div_(self.levels)
            torch.div(wide, step[:, None], out=work)
            into.copy_(work.round_().clamp_(-self.levels, self.levels))
        if self.bits == 4:
            low, high = integers.view(torch.uint8).chunk(2)
            torch.bitwise_left_shift(high, 4, out=coded)
            coded.bitwise_or_(low.bitwise_and_(0x0F))

    def decode(self, image: torch.Tensor, values: torch.Tensor) -> None:
        """Give blocks the values of an image.

        Args:
            image: (bytes of integers and magnitudes,) uint8.
            values: (num_blocks, 64), written.
        """
        coded, magnitudes = image.split(self.sizes(len(values)))
        integers, levels = coded.view(torch.int8), self.levels
        if self.bits == 4:
            # 16 times the integers, with their signs, by one operation for each half
            unpacked = self.scratch.take("unpacked", torch.uint8, values.numel())
            low, high = unpacked.chunk(2)
            torch.bitwise_left_shift(coded, 4, out=low)
            torch.bitwise_and(coded, 0xF0, out=high)
            integers, levels = unpacked.view(torch.int8), 16 * self.levels
        steps = magnitudes.view(_ABSMAX).to(torch.float32).div_(levels)[:, None]
        for chunk, into, step in zip(
            integers.view(-1, BLOCK).split(_CHUNK),
            values.split(_CHUNK),
            steps.split(_CHUNK),
            strict=True,
        ):
            if values.dtype == torch.float32:
                into.copy_(chunk).mul_(step)
            else:
                wide = self.scratch.take("wide", torch.float32, chunk.numel()).view(-1, BLOCK)
                into.copy_(wide.copy_(chunk).mul_(step))


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a parameter that lies in a slice: bytes of the range, and of the image."""

    slot: Slot
    begin: int
    end: int
    stored_bytes: int


class BlockCodec:
    """How the parameters of one frozen group lie at home.

    Args:
        slots: where they lie in the group's range; matrices begin at a multiple of a block's bytes,
            and the rest of their last block is theirs.
        format: of the matrices.
    """

    flat: torch.Tensor  # (bytes of the range,) uint8

    def __init__(self, slots: Sequence[Slot], format: BlockFormat) -> None:
        self.slots = slots
        self.format = format

    def _pieces(self, begin: int, end: int) -> Iterator[_Piece]:
        for slot in self.slots:
            low, high = max(begin, slot.offset), min(end, slot.offset + slot.room_bytes)
            if low >= high:
                continue
            stored = high - low
            if slot.coded:
                num_blocks = stored // (BLOCK * slot.dtype.itemsize)
                stored = -(-sum(self.format.sizes(num_blocks)) // 64) * 64
            yield _Piece(slot, low, high, stored)

    def stored_bytes(self, begin: int, end: int) -> int:
        """Size of the image of these bytes of the range."""
        return sum(piece.stored_bytes for piece in self._pieces(begin, end))

    def encode(self, begin: int, end: int, image: memoryview) -> None:
        """Write the image of these bytes.

        Raises:
            QuantizationError: a parameter holds NaN or infinity; says which.
        """
        for piece, stored in self._with_images(begin, end, image):
            if not piece.slot.coded:
                stored.copy_(self.flat[piece.begin : piece.end])
                continue
            self._clear_rest(piece.slot, piece.end)
            values = self._blocks(piece)
            try:
                self.format.encode(values, stored[: sum(self.format.sizes(len(values)))])
            except QuantizationError as error:
                raise QuantizationError(
                    f"{piece.slot.fqn} is frozen and stored as {self.format.name} "
                    f"(frozen_format), and {error}: give it finite values, or use "
                    "frozen_format native"
                ) from None

    def decode(self, begin: int, end: int, image: memoryview) -> None:
        """Give these bytes of the range the values of an image."""
        for piece, stored in self._with_images(begin, end, image):
            if piece.slot.coded:
                values = self._blocks(piece)
                self.format.decode(stored[: sum(self.format.sizes(len(values)))], values)
            else:
                self.flat[piece.begin : piece.end].copy_(stored)

    def round_values(self) -> None:
        """Give all parameters the values that a load from home would give them."""
        for begin, end in slices_of(0, len(self.flat)):
            size = self.stored_bytes(begin, end)
            image = memoryview(self.format.scratch.take("image", torch.uint8, size).numpy().data)
            self.encode(begin, end, image)
            self.decode(begin, end, image)

    def _with_images(
        self, begin: int, end: int, image: memoryview
    ) -> Iterator[tuple[_Piece, torch.Tensor]]:
        whole = torch.frombuffer(image, dtype=torch.uint8)
        at = 0
        for piece in self._pieces(begin, end):
            yield piece, whole[at : at + piece.stored_bytes]
            at += piece.stored_bytes

    def _blocks(self, piece: _Piece) -> torch.Tensor:
        """(num_blocks, 64) values in frames."""
        return self.flat[piece.begin : piece.end].view(piece.slot.dtype).view(-1, BLOCK)

    def _clear_rest(self, slot: Slot, end: int) -> None:
        """What fills a parameter's last block is whatever the frame held before."""
        last = slot.offset + slot.num_bytes
        if last < end:
            self.flat[last:end].zero_()
