"""Checkpoints: a folder for each, written whole or not at all, group by group.

    CHECKPOINTS/step-000100/
        group-0000.safetensors   parameters, both moments and step counters of one group, by fqn;
                                 beside parameters of bfloat16 their masters in float32
        checkpoint.json          step, identity, random state, sizes and checksums; written last

Where an adapter is trained the groups of its frozen base are left out; the header names the base.

A checkpoint is written beside its place and renamed into it, so that what bears the name is
complete. Bytes go from the pages to the file and back: no group is ever copied. `save`, `load` and
`latest` are the whole interface; the files behind them are nobody else's business.
"""

import os
import shutil
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import torch
from torch import nn

from odc.errors import CheckpointError
from odc.fsdp.group import ParamGroup
from odc.fsdp.optimizer import STATE_NAMES, PagedAdamW
from odc.fsdp.runtime import Runtime
from odc.memory.events import Kind, Op, Phase
from odc.train.checkpoint_folder import (
    HEADER,
    CheckpointWriteError,
    Identity,
    NotFiniteError,
    check_identity,
    complete,
    find,
    identity_in,
    latest,
    put_in_place,
    read_header,
    read_step,
    restore_random_state,
    sweep,
    sync_folder,
    write_error,
    write_header,
)
from odc.train.tensor_file import Buffers, FileRecord, TensorSpec, read_tensors, write_tensors

__all__ = [
    "CheckpointWriteError",
    "Identity",
    "NotFiniteError",
    "find",
    "identity_in",
    "latest",
    "load",
    "read_step",
    "save",
]

# Context of passes that are no forward, as in `odc.paged`: they leave recorded orders alone.
_NO_FORWARD = -2


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: PagedAdamW,
    identity: Identity,
    *,
    keep: int = 2,
) -> Path:
    """Writes a checkpoint and deletes all but the newest `keep`.

    Args:
        folder: Folder of the run's checkpoints.
        step: Steps that are done; the next one has this number.
        model: The paged model, between two steps.
        optimizer: Its optimizer.
        identity: What the checkpoint belongs to.
        keep: Complete checkpoints to keep, this one included.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointWriteError: The disk is full or cannot be written.
        NotFiniteError: A weight or moment is NaN or infinite; nothing is kept of the checkpoint.
    """
    final = folder / f"step-{step:06d}"
    partial = folder / f".{final.name}.{os.getpid()}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        partial.mkdir()
        records = _write_groups(partial, model, optimizer, identity)
        write_header(partial, step, identity, records)
        sync_folder(partial)
        put_in_place(partial, final)
        sync_folder(folder)
    except NotFiniteError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise write_error(final, error) from error
    for old in complete(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load(path: Path, model: nn.Module, optimizer: PagedAdamW, identity: Identity) -> int:
    """Fills a paged model, its optimizer and torch's random state from a checkpoint.

    Args:
        path: A checkpoint's folder.
        model: The paged model.
        optimizer: Its optimizer.
        identity: What the checkpoint must belong to.

    Returns:
        The number of the next step.

    Raises:
        CheckpointError: The checkpoint is damaged or belongs to another model or corpus; the
            message names the file.
    """
    check_identity(path, identity)
    header = read_header(path)
    runtime = _runtime(model)
    runtime.manager.begin_pass(_NO_FORWARD)
    if "ranks" in header:
        _load_of_ranks(path, runtime, optimizer)
    groups = _saved_groups(runtime, identity)
    for index, group in groups.items() if "ranks" not in header else ():
        name = _file_name(index)
        if name not in header["files"]:
            raise CheckpointError(f"{path / HEADER}: lists no {name}; the checkpoint is damaged")
        read_tensors(
            path / name,
            _specs(group),
            _group_bytes(runtime, optimizer, group, Op.WRITE),
            FileRecord(**header["files"][name]),
        )
    restore_random_state(header)
    return int(header["step"])


# Groups.


def _runtime(model: nn.Module) -> Runtime:
    return model._odc_runtime  # type: ignore[return-value]


def _load_of_ranks(path: Path, runtime: Runtime, optimizer: PagedAdamW) -> None:
    """From a checkpoint of several ranks, tensor by tensor."""
    from odc.train.rank_checkpoint import WholeTensors

    saved = WholeTensors(path)
    for group in runtime.groups:
        tensors = _group_tensors(runtime, optimizer, group, Op.WRITE)
        for spec, tensor in zip(_specs(group), tensors, strict=True):
            saved.read(spec.name, tensor.detach())


def _saved_groups(runtime: Runtime, identity: Identity) -> dict[int, ParamGroup]:
    """The groups that lie in a checkpoint, by number: all, or those that are trained."""
    groups = dict(enumerate(runtime.groups))
    return {i: g for i, g in groups.items() if g.trainable} if identity.adapter else groups


def _write_groups(
    folder: Path, model: nn.Module, optimizer: PagedAdamW, identity: Identity
) -> dict[str, FileRecord]:
    runtime = _runtime(model)
    runtime.manager.begin_pass(_NO_FORWARD)
    records = {}
    for index, group in _saved_groups(runtime, identity).items():
        buffers = _group_bytes(runtime, optimizer, group, Op.READ)
        name = _file_name(index)
        records[name] = write_tensors(folder / name, _specs(group), buffers)
    return records


def _file_name(index: int) -> str:
    return f"group-{index:04d}.safetensors"


def _specs(group: ParamGroup) -> list[TensorSpec]:
    specs = [TensorSpec(f"param.{s.fqn}", s.dtype, tuple(s.shape)) for s in group.slots]
    for name in STATE_NAMES[: group.spec.num_moments]:
        specs += [
            TensorSpec(f"{name}.{s.fqn}", group.moment_dtype(i), tuple(s.shape))
            for i, s in enumerate(group.slots)
        ]
    if group.trainable:
        specs += [TensorSpec(f"step.{s.fqn}", torch.float32, ()) for s in group.slots]
    return specs


def _group_bytes(runtime: Runtime, optimizer: PagedAdamW, group: ParamGroup, op: Op) -> Buffers:
    """Yields the bytes of each of a group's tensors, pinned while they are used."""
    with closing(_group_tensors(runtime, optimizer, group, op)) as tensors:
        yield from map(_bytes, tensors)


def _group_tensors(
    runtime: Runtime, optimizer: PagedAdamW, group: ParamGroup, op: Op
) -> Generator[torch.Tensor, None, None]:
    """Yields each of a group's tensors, pinned while they are used.

    One kind at a time: that much fits every budget in which the group can be trained.
    """
    if op == Op.WRITE:
        group.note_written()
    yield from _pinned(runtime, group, Kind.PARAMETER, op, 1)
    if not group.trainable:
        return
    if group.spec.at_home:
        yield from _at_home(runtime, group, op)
    else:
        yield from _pinned(runtime, group, Kind.MOMENT, op, group.spec.num_moments)
    yield from optimizer.steps_of(group)


def _pinned(
    runtime: Runtime, group: ParamGroup, kind: Kind, op: Op, num_slots: int
) -> Generator[torch.Tensor, None, None]:
    manager = runtime.manager
    manager.access(group.group, [(kind, op)], Phase.OTHER)
    try:
        for slot in range(num_slots):
            for index in range(len(group.slots)):
                view = group.view(kind, index, slot)
                if op == Op.READ:
                    _check_finite(kind, group.slots[index].fqn, view)
                yield view
    finally:
        try:
            if op == Op.WRITE and kind == Kind.PARAMETER:
                group.round_values()
        finally:
            manager.release(group.group, kind)


def _at_home(runtime: Runtime, group: ParamGroup, op: Op) -> Generator[torch.Tensor, None, None]:
    """Moments that stay at home, and masters, one range at a time."""
    write = op == Op.WRITE
    for slot in range(group.spec.num_moments):
        with runtime.manager.at_home(group.group, Kind.MOMENT, slot, write) as buffer:
            for index in range(len(group.slots)):
                view = group.home_view(buffer, index)
                if op == Op.READ:
                    _check_finite(Kind.MOMENT, group.slots[index].fqn, view)
                yield view


def _check_finite(kind: Kind, fqn: str, tensor: torch.Tensor) -> None:
    """Smallest and largest are NaN where any number is, and need no copy, as `isfinite` would."""
    if tensor.numel() and tensor.is_floating_point():
        least, most = torch.aminmax(tensor.detach())
        if not (torch.isfinite(least) and torch.isfinite(most)):
            what = "weights" if kind == Kind.PARAMETER else "optimizer moments"
            raise NotFiniteError(f"the {what} of {fqn} hold NaN or infinity")


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
