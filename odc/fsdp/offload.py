"""What layers save for backward, moved home and loaded ahead of their backward.

The unit that moves is a *storage*: whole, once, however many tensors over it were saved and by how
many layers, so that every tensor comes back with the strides it had. The commands are those of
pages, on the same lines and at the same pace.

[Note: exact bytes, not frames] A saved storage was made by torch's allocator; to put it into frames
of the pool it would have to be copied on the device, and be there twice for a moment, and the pool
could not be smaller for it than activations are at their peak. So storages keep the memory they
were made in and are given back to the allocator. They are part of the rest that the ledger
measures, of which pages get what is left, and have an account of their own in bytes; what they take
at home is told apart from it.

[Note: two layers on the device] When a call of a layer begins, the storages of the call before it
begin their way home, and those of the call before that must be there and leave the device. In
backward the first tensor that is asked for of a call starts the loads of all of it, and of the call
before it. So the storages of two calls are on the device at a time. Those of the last call never
leave: its backward comes first.

Nothing here is kept alive by a list: storages live as long as the graph holds a tensor of theirs.
One that dies while it moves is put aside until the engine is done with it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from odc.fsdp.activations import Kept, Meter, modified, top_hooks
from odc.memory.activations import OFFLOAD_BYTES
from odc.memory.buffers import HostBuffer, HostBuffers
from odc.memory.engines.base import CommandKind, Priority, Ticket
from odc.memory.events import Kind
from odc.memory.pages import Page

if TYPE_CHECKING:
    from odc.memory.manager import MemoryManager


class _Call:
    """One call of a layer, and the storages that were saved in it."""

    __slots__ = ("before", "blocks")

    def __init__(self, before: _Call | None) -> None:
        self.before = before
        self.blocks: list[weakref.ref[_Block]] = []

    def alive(self) -> Iterator[_Block]:
        """The storages that some tensor of the graph still needs, in the order of saving."""
        for reference in self.blocks:
            block = reference()
            if block is not None:
                yield block


class _Block:
    """A saved storage.

    Attributes:
        number: of its commands; below 0, since it is no page.
        device: a tensor over it while it is on the device, else None.
        original: it has never left the device: ``device`` is what the layer made.
        home: where it lies at home, once it is on its way there.
    """

    __slots__ = (
        "__weakref__",
        "_offloader",
        "device",
        "home",
        "load",
        "num_bytes",
        "number",
        "original",
        "spoiled",
        "store",
        "version",
    )

    def __init__(self, offloader: Offloader, tensor: torch.Tensor, number: int) -> None:
        self._offloader = offloader
        self.number = number
        self.device: torch.Tensor | None = tensor
        self.num_bytes = tensor.untyped_storage().nbytes()
        self.version = tensor._version
        self.original = True
        self.spoiled = False
        self.home: HostBuffer | None = None
        self.store: Ticket | None = None
        self.load: Ticket | None = None

    def __del__(self) -> None:
        # Nothing but an append: this may run on any thread, inside any lock.
        if self.home is not None:
            self._offloader.dead.append((self.device, self.home, self.store, self.load))

    def page(self) -> Page:
        """What its commands name: addresses on the device and at home."""
        assert self.device is not None and self.home is not None
        address = self.device.untyped_storage().data_ptr()
        kind = Kind.PARAMETER  # of no meaning
        return Page(self.number, -1, kind, 0, 0, self.num_bytes, 0, address, self.home.address)


class _Moved:
    """What autograd holds in place of a tensor."""

    __slots__ = ("block", "call", "dtype", "offset", "size", "stride", "version")

    def __init__(self, tensor: torch.Tensor, block: _Block, call: _Call) -> None:
        self.block, self.call = block, call
        self.dtype, self.version = tensor.dtype, tensor._version
        self.size, self.stride = tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()

    def view(self) -> torch.Tensor:
        """The tensor, over the storage as it is on the device now."""
        device = self.block.device
        assert device is not None
        found = torch.empty(0, dtype=self.dtype, device=device.device)
        return found.set_(device.untyped_storage(), self.offset, self.size, self.stride)  # type: ignore[call-overload, no-any-return]


class Offloader:
    """Moves the storages that the layers of one model save.

    Args:
        manager: whose engine moves them; in its ledger they are counted.
        meter: counts what is on the device, in passes that are measured.

    Attributes:
        dead: storages that died with a home or on their way, to be swept up.
    """

    def __init__(self, manager: MemoryManager, meter: Meter) -> None:
        self._manager = manager
        self._engine = manager.transfers.engine
        self._meter = meter
        self._account = meter.account
        self._buffers = HostBuffers()
        self.dead: deque[tuple[torch.Tensor | None, HostBuffer, Ticket | None, Ticket | None]] = (
            deque()
        )
        self._known: dict[int, tuple[weakref.ref[Any], weakref.ref[_Block]]] = {}
        self._number = 0
        self._filled: _Call | None = None  # the last call; its storages are on the device
        self._leaving: _Call | None = None  # the one before; its storages are on their way home
        self._returned: _Call | None = None  # whose backward runs

    # -- forward ---------------------------------------------------------------------------------

    @contextmanager
    def layer(self) -> Iterator[None]:
        """A call of a layer: what it saves is moved, unless somebody else's hooks are in force."""
        hooks = top_hooks()
        if hooks is not None and hooks[0] != self._meter.pack:
            yield
            return
        call = self._begin_call()

        def pack(tensor: torch.Tensor) -> Kept | _Moved:
            return self._pack(tensor, call)

        with saved_tensors_hooks(pack, self._unpack):
            yield

    def _begin_call(self) -> _Call:
        self.sweep()
        if self._leaving is not None:
            self._put_away(self._leaving)
        if self._filled is not None:
            for block in self._filled.alive():
                self._send_home(block)
        followed = self._filled is not None and any(self._filled.alive())  # not one of the past
        self._leaving, self._filled = self._filled, _Call(self._filled if followed else None)
        return self._filled

    def _pack(self, tensor: torch.Tensor, call: _Call) -> Kept | _Moved:
        if self._meter.active:
            self._meter.count(tensor)
        block = self._block_of(tensor)
        if block is None:
            return Kept(tensor)
        if not call.blocks or call.blocks[-1]() is not block:
            call.blocks.append(weakref.ref(block))
        return _Moved(tensor, block, call)

    def _block_of(self, tensor: torch.Tensor) -> _Block | None:
        """The block of a tensor's storage, or None for what stays."""
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_conj() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        if storage.nbytes() < OFFLOAD_BYTES or self._meter.is_constant(storage):
            return None
        known = self._known.get(key)
        if known is not None:
            block = known[1]()
            if block is not None and block.version == tensor._version and not block.spoiled:
                return block
        self._number -= 1
        block = _Block(self, tensor.detach(), self._number)
        known_storage = known[0] if known is not None else weakref.ref(storage, self._forget(key))
        self._known[key] = known_storage, weakref.ref(block)
        return block

    def _forget(self, key: int) -> Any:
        known = self._known

        def forget(_: Any) -> None:
            known.pop(key, None)

        return forget

    def _send_home(self, block: _Block) -> None:
        if block.home is not None or block.device is None:
            return
        block.home = self._buffers.take(block.num_bytes)
        self._account.home_bytes = self._buffers.touched_bytes
        block.store = self._engine.submit(CommandKind.STORE, block.page())
        self._account.bytes_out += block.num_bytes

    def _put_away(self, call: _Call) -> None:
        """The storages of a call leave the device; those that are not home yet are waited for."""
        shared = {id(b) for b in self._filled.alive()} if self._filled is not None else set()
        for block in call.alive():
            if id(block) not in shared:
                self._leave(block)

    def _leave(self, block: _Block) -> None:
        """A storage whose way home was begun leaves the device."""
        if block.device is None or block.home is None:
            return
        if block.store is not None:
            self._wait(block.store)
            block.store = None
        if block.load is not None:
            if not self._cancel(block.load):
                self._wait(block.load)
            block.load = None
        if block.original:
            block.spoiled = block.device._version != block.version
            block.original = False
        block.device = None

    # -- backward --------------------------------------------------------------------------------

    def _unpack(self, saved: Kept | _Moved) -> torch.Tensor:
        if isinstance(saved, Kept):
            return saved.get()
        self._return(saved.call)
        block = saved.block
        if block.device is None:
            self._fetch(block)
        if block.load is not None:
            self._wait(block.load)
            block.load = None
        assert block.device is not None
        if block.spoiled or (block.original and block.device._version != saved.version):
            raise modified(saved.size, saved.version)
        return saved.view()

    def _return(self, call: _Call) -> None:
        """A tensor of a call is asked for: its backward has begun."""
        last = self._returned
        if call is last:
            return
        self.sweep()
        self._returned = call
        needed = list(call.alive())
        before = list(call.before.alive()) if call.before is not None else []
        if last is not None:  # with retain_graph its storages live on
            stay = {id(b) for b in (*needed, *before)}
            for block in last.alive():
                if id(block) not in stay:
                    self._leave(block)
        for block in (*needed, *before):
            self._fetch(block)

    def _fetch(self, block: _Block) -> None:
        if block.device is not None:
            return
        block.device = torch.empty(block.num_bytes, dtype=torch.uint8)
        block.load = self._engine.submit(CommandKind.LOAD, block.page(), priority=Priority.NORMAL)
        self._account.bytes_in += block.num_bytes
        if self._meter.active:
            self._meter.returned(block.device)

    def end_backward(self) -> None:
        """A backward is over: what was loaded and lives on leaves the device again."""
        last, self._returned = self._returned, None
        if last is not None:
            for call in (last, last.before):
                for block in call.alive() if call is not None else ():
                    self._leave(block)
        self.sweep()

    # -- the engine ------------------------------------------------------------------------------

    def _wait(self, ticket: Ticket) -> None:
        if self._engine.poll(ticket):
            return
        start = self._engine.now_ns()
        self._engine.wait(ticket)
        self._manager.waited(self._engine.now_ns() - start)

    def sweep(self) -> None:
        """Take the home memory back of storages that died; what still moves waits for its turn."""
        for _ in range(len(self.dead)):
            device, home, store, load = entry = self.dead.popleft()
            if all(self._is_over(ticket) for ticket in (store, load) if ticket is not None):
                self._buffers.give(home)
            else:
                self.dead.append(entry)

    def _is_over(self, ticket: Ticket) -> bool:
        """Whether the engine has no more to do with a command, or never will have."""
        return ticket.done_ns >= 0 or ticket.cancelled or self._cancel(ticket)

    def _cancel(self, ticket: Ticket) -> bool:
        """Take a command back that has not begun."""
        if not self._engine.cancel(ticket):
            return False
        if ticket.kind == CommandKind.STORE:
            self._account.bytes_out -= ticket.page.num_bytes
        else:
            self._account.bytes_in -= ticket.page.num_bytes
        return True

    @property
    def home_bytes(self) -> int:
        """Of storages that are alive, or not swept up yet."""
        return self._buffers.used_bytes
