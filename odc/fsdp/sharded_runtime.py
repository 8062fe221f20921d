"""What the units of a sharded model share: gathers and reductions in flight, and their order.

[Note: unshard ahead] A gather that starts when a module begins is exposed. In the first pass the
order of gathers is recorded; from then on the gather of the group that follows starts as soon as
the present one is there, as long as what is gathered (and the present one's gradients) stay below
a chosen `dbuffer_size`. The order is that of modules, which all ranks share, and the bytes are
those of whole buffers; no clock and no prediction enters, so ranks cannot disagree.

[Note: the frames of a reduction] A reduction goes on while the gradients of the next group arrive,
so two groups' are there. Both move over the same line, so the gather that is to follow in backward
loses nothing if it begins when the reduction has ended; it then takes the frames that this gives
back. With the group in use that makes three groups of frames at any time, not four. The gather
takes its place in the order of calls when the group in use begins its backward, the same moment on
all ranks; when it begins is each rank's own affair. Where two groups of gradients do not fit into a
chosen `dbuffer_size`, the reduction is waited for first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from odc.errors import RankLostError
from odc.fsdp.comm import CommError, GroupComm, Work, make_comm
from odc.fsdp.heartbeat import Heartbeat
from odc.fsdp.passes import Passes
from odc.fsdp.sharded import ShardedGroup
from odc.fsdp.storage import GatherPool
from odc.memory.events import Phase


class Reduction:
    """The gradients of one group, being reduced."""

    def __init__(self, group: ShardedGroup, outputs: list[torch.Tensor], fresh: bool) -> None:
        self.group = group
        self.present = group.fill_gradients()
        group.has_gradient = [False] * len(group.places)  # they belong to the reduction now
        self.outputs = outputs
        self.fresh = fresh  # the outputs are the group's own gradient slices
        self.works: list[Work] = []
        self.follower: ShardedGroup | None = None  # its gather begins when this has ended
        self._lock = threading.Lock()
        self._returned = False

    def return_frames(self) -> None:
        """Gives up the memory that was reduced, once; any thread may."""
        with self._lock:
            if not self._returned:
                self._returned = True
                self.group.buffer.return_gradients()

    @property
    def shared_bytes(self) -> int:
        """Of its gradients and of what is gathered in their place."""
        following = 0 if self.follower is None else self.follower.buffer.full_bytes
        return min(following, self.group.buffer.gradient_bytes)

    def finish(self, replicas: GroupComm | None, divisor: float | None) -> None:
        """Waits, and shows the gradients, unless they are to be added up over replicas later."""
        for work in self.works:
            work.wait()
        self._add_partial()
        if self.group.mesh.ndim > 1 and replicas is None:
            self._keep_partial()
            self.return_frames()
            self.group.buffer.give_gradients()
            return
        if replicas is not None:
            replicas.owner = self.group.number
            works = [replicas.all_reduce(out, divide_by=divisor) for out in self.outputs]
            for work in works:
                work.wait()
        group = self.group
        hook = group.behaviour.reduce_hook
        if hook is not None and group.behaviour.requires_all_reduce:
            for out in self.outputs:
                hook(out)
        self.return_frames()
        group.buffer.give_gradients()
        group.show_gradients(self.present, None if self.fresh else self.outputs)

    def _add_partial(self) -> None:
        """What earlier backwards of the step left is a part of the sum."""
        partial, self.group.partial = self.group.partial, None
        if partial is not None:
            present, sums = partial
            self.present = sorted({*present, *self.present})
            torch._foreach_add_(self.outputs, sums)

    def _keep_partial(self) -> None:
        outputs = [out.clone() for out in self.outputs] if self.fresh else self.outputs
        self.group.partial = (self.present, outputs)


def _nothing() -> None:
    pass


_COMMS: dict[int, tuple[dist.ProcessGroup, GroupComm]] = {}  # by id of the group, kept alive


def comm_of(group: dist.ProcessGroup, device: torch.device) -> GroupComm:
    """The collectives of a process group: one object, since its calls are numbered."""
    if id(group) not in _COMMS:
        _COMMS[id(group)] = (group, make_comm(group, device))
    return _COMMS[id(group)][1]


_HEARTBEATS: dict[int, tuple[Any, Heartbeat]] = {}  # by id of the world, kept alive
_STANDING: list[int] = []  # the rank whose heartbeat stopped


def watch_ranks() -> None:
    """Starts the heartbeat of this process, once a world."""
    world = dist.group.WORLD
    size = dist.get_world_size()
    if size == 1 or id(world) in _HEARTBEATS or dist.get_backend() != "gloo":
        return
    store = dist.distributed_c10d._get_default_store()
    _STANDING.clear()
    _HEARTBEATS[id(world)] = (world, Heartbeat(store, dist.get_rank(), size, _give_up))


def _first_lost(rank: int) -> int:
    beating = _HEARTBEATS.get(id(dist.group.WORLD))
    return rank if beating is None else beating[1].first_lost(rank)


def _give_up(rank: int) -> None:
    _STANDING.append(rank)
    for _, comm in list(_COMMS.values()):
        comm.abort()


class ShardedRuntime(Passes):
    """State shared by the hooks of one sharded model.

    Args:
        model: the root module.
        pool: memory of what is gathered.
    """

    def __init__(self, model: nn.Module, pool: GatherPool) -> None:
        super().__init__(model)
        self.pool = pool
        self.groups: list[ShardedGroup] = []
        self.collective = self  # type: ignore[assignment]
        # By id of mesh: shards, replicas.
        self.comms: dict[int, tuple[GroupComm, GroupComm | None]] = {}
        self.is_last_backward = True
        self._gathers: dict[int, list[Work]] = {}  # by id of group
        self._unasked: set[int] = set()  # of these, gathers that nobody has waited for yet
        self._reductions: list[Reduction] = []
        self._orders: dict[bool, list[ShardedGroup]] = {True: [], False: []}
        self._at: dict[bool, int] = {True: 0, False: 0}
        self.called = False  # a forward ran; until then a module around the model may become it
        self.partial = False  # what runs was called by itself, not by the root
        self.step = 0  # backwards that ended with a reduction
        self._lost = False  # a rank is gone: nothing that is in flight will come

    def join(self, group: ShardedGroup) -> None:
        """Adds a group; groups of one mesh share its collectives."""
        group.number = len(self.groups)
        self.groups.append(group)
        group.take_gradient = self.take_gradient
        mesh, device = group.mesh, group.buffer.device
        shards = comm_of(mesh.get_group(mesh.ndim - 1), device)
        replicas = comm_of(mesh.get_group(0), device) if mesh.ndim > 1 else None
        self.comms[id(mesh)] = (shards, replicas)
        watch_ranks()

    def bytes_to_overlap(self) -> int:
        """Of the buffers of a step in which gathers and reductions hide behind computing.

        Groups that stay gathered, one in use and one ahead; two groups of gradients, of which one
        is there only before the one ahead; the root's gradients.
        """
        groups = self.groups
        kept = [g.buffer.full_bytes for g in groups if not g.behaviour.reshard_after_forward]
        others = groups[1:] or groups
        passing = max(group.buffer.full_bytes for group in others)
        gradients = max(group.buffer.gradient_bytes for group in others)
        both = passing + gradients + max(passing, gradients)
        return sum(kept) + both + groups[0].buffer.gradient_bytes

    def take_over(self, other: ShardedRuntime) -> None:
        """Gathers that were asked for before the first forward."""
        self._gathers.update(other._gathers)
        other._gathers.clear()

    @contextmanager
    def _told(self, group: ShardedGroup) -> Iterator[None]:
        """A failed collective says which parameters it was about, and when."""
        try:
            yield
        except CommError as error:
            self._lost = True
            rank, reason = error.peer, str(error)
            if _STANDING:
                rank = _STANDING[0]
                reason = f"rank {rank} stands still (its heartbeat stopped)"
            elif rank is not None and (first := _first_lost(rank)) != rank:
                rank, reason = first, f"{reason}; it ended because rank {first} was lost"
            raise RankLostError(reason, rank=rank, group=group.name, step=self.step) from error

    # -- passes ----------------------------------------------------------------------------------

    def begin_pass(self, args: Any, kwargs: Any) -> None:
        self.partial = False
        self.recover()
        self.forward_phase = Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION
        self._drop_unused()
        self._at = {True: 0, False: 0}
        for group in self.groups:
            group.adopt()
        self.check_materialized()

    def check_materialized(self) -> None:
        """Refuses to train parameters that never got values.

        Raises:
            RuntimeError: some are on the meta device.
        """
        for group in self.groups:
            missing = {id(p) for p in group.sharded if p.is_meta}
            if missing:
                names = [n for n, p in self.model.named_parameters() if id(p) in missing]
                raise RuntimeError(
                    "FSDP parameters should be materialized from meta device before training, but "
                    f"the following were still on meta device: {names}\nFor example, call "
                    "module.to_empty(device=...) and then module.reset_parameters() on each module"
                )

    def _drop_unused(self) -> None:
        """Gathers that were started ahead for a module that was not called."""
        for group in self.groups:
            if id(group) in self._unasked:
                self.wait(group)
                group.reshard()

    def check_backward(self) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True is not supported on a sharded model: the second backward would "
                "read parameters that have been given up; take second derivatives of an unsharded "
                "copy"
            )

    def end_backward(self) -> None:
        for group in self.groups:
            self.settle(group, last=True)
            group.received.clear()
        if self.is_last_backward:
            self.finish_reductions()
        self.step += any(group.behaviour.requires_sync for group in self.groups)
        for unit in self.units:
            unit.awaited = 0  # a graph that was dropped gets no backward
        self._drop_unused()
        self._at[False] = 0

    def forget_pass(self) -> None:
        if self._lost:
            raise RuntimeError(
                "a rank of this model was lost: its process group cannot be used any more; start "
                "all ranks again from a checkpoint"
            )
        for reduction in self._reductions:  # first: they read the gradients that are dropped
            for work in reduction.works:
                work.wait()
        self._reductions.clear()
        for group in self.groups:
            self.wait(group)
            group.reshard()
            group.drop_gradients()

    # -- gathering -------------------------------------------------------------------------------

    def unshard(self, group: ShardedGroup) -> None:
        """Makes the full parameters available, and starts the gather that follows."""
        self.start(group)
        self.wait(group)
        self._ahead(group)

    def start(self, group: ShardedGroup) -> None:
        """Starts a gather, unless the group is gathered."""
        if not group.is_gathered:
            comm, _ = self.comms[id(group.mesh)]
            comm.owner = group.number
            self._gathers[id(group)] = [comm.all_gather(full) for full in group.buffer.take_full()]

    def _start_after(self, reduction: Reduction, group: ShardedGroup) -> None:
        """See [Note: the frames of a reduction]."""
        comm, _ = self.comms[id(group.mesh)]
        comm.owner = group.number
        reduction.follower = group

        def make_room() -> None:
            reduction.return_frames()
            group.buffer.fill_full()

        works: list[Work] = []
        for full in group.buffer.claim_full():
            works.append(comm.all_gather_after(full, _nothing if works else make_room))
        self._gathers[id(group)] = [*reduction.works, *works]  # that it failed is told by it

    def wait(self, group: ShardedGroup) -> None:
        """Waits for a gather and shows the full parameters."""
        self._unasked.discard(id(group))
        works = self._gathers.pop(id(group), None)
        if works is None:
            return
        with self._told(group):
            for work in works:
                work.wait()
        group.show(group.unsharded)

    def _ahead(self, group: ShardedGroup) -> None:
        """See [Note: unshard ahead]; a part that is called by itself has no recorded order."""
        forward = torch._C._current_graph_task_id() == -1
        behaviour = group.behaviour
        chosen = behaviour.ahead_forward if forward else behaviour.ahead_backward
        for following in chosen or ():
            if not following.is_gathered:
                self.start(following)
                self._unasked.add(id(following))
        if self.partial or chosen is not None:
            return
        order, at = self._orders[forward], self._at[forward]
        if at >= len(order) or order[at] is not group:
            del order[at:]
            order.append(group)
        self._at[forward] = at + 1
        for following in order[at + 1 : at + 2]:
            needed = self.pool.gathered_bytes + following.buffer.full_bytes
            needed += 0 if forward else group.buffer.gradient_bytes
            if not following.is_gathered and self.pool.has_room(needed):
                reduction = None if forward else self._reduction_before(following)
                if reduction is None:
                    self.start(following)
                else:
                    self._start_after(reduction, following)
                self._unasked.add(id(following))

    def _reduction_before(self, group: ShardedGroup) -> Reduction | None:
        """What is being reduced on a group's mesh, and has given its frames to nobody."""
        comm, _ = self.comms[id(group.mesh)]
        for reduction in self._reductions:
            same = self.comms[id(reduction.group.mesh)][0] is comm
            if same and comm.gathers_after and reduction.follower is None:
                return reduction
        return None

    def reshard(self, group: ShardedGroup, phase: Phase) -> None:
        """Gives the full parameters up where the group's behaviour says so."""
        if group.pins > 1:  # another module of the group is not done
            return
        behaviour = group.behaviour
        if phase in (Phase.FORWARD, Phase.EVALUATION):
            keep = not behaviour.reshard_after_forward
            if phase == Phase.EVALUATION:  # no backward comes that would; an update may
                keep = keep and behaviour.keeps_after_evaluation
        else:
            keep = not behaviour.reshard_after_backward
        if not keep:
            self.wait(group)
            group.reshard()

    # -- gradients -------------------------------------------------------------------------------

    def take_gradient(self, group: ShardedGroup, index: int) -> None:
        self.begin_backward()
        if any(reduction.group is group for reduction in self._reductions):
            self.finish_reductions()  # of an earlier backward: the buffer is needed again
        if not self._has_room_for_gradients(group):
            self.finish_reductions()
        group.add_gradient(index)
        if group.complete and not group.behaviour.fill_unused:
            self.settle(group, last=True)

    def _has_room_for_gradients(self, group: ShardedGroup) -> bool:
        """See [Note: the frames of a reduction].

        What else a reduction's end sets going, over replicas or in a hook, keeps its place among
        the collectives of all ranks; there is always room beside it.
        """
        in_flight = (reduction.group for reduction in self._reductions)
        if any(other.mesh.ndim > 1 or other.behaviour.reduce_hook for other in in_flight):
            return True
        pool, buffer = self.pool, group.buffer
        needed = pool.gathered_bytes + pool.gradient_bytes + buffer.gradient_bytes
        needed -= sum(reduction.shared_bytes for reduction in self._reductions)
        return buffer.has_gradients or pool.has_room(needed)

    def settle(self, group: ShardedGroup, last: bool = False) -> None:
        """Starts the reduction once a group has all gradients of this backward.

        A parameter may get none: an expert without tokens. So the end of its module's backward
        tells as well, if no other call of the module is still to come. Where ranks may use
        different parameters (`fill_unused`), that is the only moment which they share.
        """
        if not any(group.has_gradient) or not group.behaviour.requires_sync:
            return
        if last or self._is_over(group):
            self._reduce(group)

    def _is_over(self, group: ShardedGroup) -> bool:
        units = [unit for unit in self.units if group in unit.groups.all]
        return len(units) == 1 and not units[0].awaited

    def _reduce(self, group: ShardedGroup) -> None:
        self.finish_reductions()  # beside this group's gradients, only those of the next are there
        comm, replicas = self.comms[id(group.mesh)]
        buffer = group.buffer
        dtypes = [buffer.reduce_dtype or part.incoming.tensor.dtype for part in buffer.parts]
        fresh = group.slices_are_free() and all(
            dtype == part.local.dtype for dtype, part in zip(dtypes, buffer.parts, strict=True)
        )
        outputs = [
            buffer.gradient_slice(number) if fresh else torch.empty_like(part.local, dtype=dtype)
            for number, (part, dtype) in enumerate(zip(buffer.parts, dtypes, strict=True))
        ]
        reduction = Reduction(group, outputs, fresh)
        comm.owner = group.number
        divisor = None if replicas is not None else self._divisor(group)
        reduction.works = [
            comm.reduce_scatter(part.incoming.tensor, out, divide_by=divisor, dtype=out.dtype)
            for part, out in zip(buffer.parts, outputs, strict=True)
        ]
        self._reductions.append(reduction)

    def _divisor(self, group: ShardedGroup) -> float:
        factor = group.behaviour.divide_factor
        return float(group.mesh.size()) if factor is None else factor

    def _finish(self, reduction: Reduction) -> None:
        group = reduction.group
        replicas = self.comms[id(group.mesh)][1] if group.behaviour.requires_all_reduce else None
        with self._told(group):
            reduction.finish(replicas, self._divisor(group))

    def finish_reductions(self) -> None:
        """Waits for all reductions and shows the gradients."""
        while self._reductions:
            self._finish(self._reductions.pop(0))
