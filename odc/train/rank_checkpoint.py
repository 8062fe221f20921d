"""Checkpoints of several ranks: each writes and reads its own part of every tensor.

    CHECKPOINTS/step-000100/
        __0_0.distcp, __1_0.distcp   a rank's parts of parameters and moments
        .metadata                    where each part lies; see `dcp_metadata.py`
        checkpoint.json              as in `checkpoint.py`, with the number of ranks

The files are those of `torch.distributed.checkpoint`; the header and the name come last, from rank
0, when all ranks are done. Any number of ranks can go on from it, one (`WholeTensors`) too.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from odc.errors import CheckpointError
from odc.fsdp.fully_shard import FSDPModule
from odc.train.checkpoint_folder import (
    Identity,
    NotFiniteError,
    check_identity,
    complete,
    put_in_place,
    read_header,
    restore_random_state,
    sweep,
    sync_folder,
    write_error,
    write_header,
)
from odc.train.dcp_metadata import METADATA, CheckpointReader
from odc.train.ranks import Ranks
from odc.train.tensor_file import FileRecord

_MOMENTS = ("exp_avg", "exp_avg_sq")
_CHUNK = 1 << 20


def fill_moments(optimizer: torch.optim.Optimizer) -> None:
    """Makes every moment and step counter, as AdamW makes them where it first uses them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                for name in _MOMENTS:
                    state[name] = torch.zeros_like(parameter)


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    identity: Identity,
    ranks: Ranks,
    *,
    keep: int = 2,
) -> Path:
    """Writes a checkpoint; every rank calls it. Rank 0 deletes all but the newest `keep`.

    Args:
        folder: Folder of the run's checkpoints.
        step: Steps that are done; the next one has this number.
        model: The sharded model, between two steps.
        optimizer: Its optimizer, with all moments (`fill_moments`).
        identity: What the checkpoint belongs to.
        ranks: Who writes.
        keep: Complete checkpoints to keep, this one included.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointWriteError: The disk is full or cannot be written.
        NotFiniteError: A weight or moment is NaN or infinite.
        PeerError: One of these, on another rank.
    """
    final = folder / f"step-{step:06d}"
    partial = folder / f".{final.name}.partial"
    state = _state(model, optimizer)

    def begin() -> None:
        _check_finite(state)
        if ranks.is_root:
            folder.mkdir(parents=True, exist_ok=True)
            sweep(folder)
            partial.mkdir()

    def finish() -> None:
        records = {name: record for found in written for name, record in found.items()}
        write_header(partial, step, identity, records, ranks.size)
        sync_folder(partial)
        put_in_place(partial, final)
        sync_folder(folder)
        for old in complete(folder)[keep:]:
            shutil.rmtree(old, ignore_errors=True)

    try:
        ranks.together(begin)
        _write(partial, {**state, f"rng.{ranks.rank}": torch.get_rng_state()})
        written = ranks.together(lambda: _records(partial, ranks))
        ranks.on_root(finish)
    except OSError as error:
        raise write_error(final, error) from error
    finally:
        if ranks.is_root:
            shutil.rmtree(partial, ignore_errors=True)
    return final


def load(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    identity: Identity,
    ranks: Ranks,
) -> None:
    """Fills a sharded model and its optimizer from a checkpoint; every rank calls it.

    Raises:
        CheckpointError: The checkpoint is damaged or belongs to another model or corpus.
        PeerError: It is, for another rank.
    """
    ranks.together(lambda: _check(path, identity, ranks))
    reader = CheckpointReader(path)
    state = _state(model, optimizer)
    random = f"rng.{ranks.rank}"
    # A rank more than there were begins with rank 0's; no operation of a model draws from it.
    restore_random_state(read_header(path))
    if random in reader.metadata.state_dict_metadata:
        state[random] = torch.get_rng_state()
    _read(reader, state, no_dist=False)
    if random in state:
        torch.set_rng_state(state[random])


class WholeTensors:
    """The tensors of a checkpoint, each whole: one process goes on from several.

    Args:
        path: A checkpoint's folder.

    Raises:
        CheckpointError: A file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        check_files(path)
        self._path = path
        self._reader = CheckpointReader(path)

    def read(self, name: str, into: Tensor) -> None:
        """Fills a tensor.

        Raises:
            CheckpointError: The checkpoint does not hold it.
        """
        if name not in self._reader.metadata.state_dict_metadata:
            raise CheckpointError(f"{self._path}: holds no {name}; the checkpoint is damaged")
        _read(self._reader, {name: into}, no_dist=True)


def check_files(path: Path, rank: int = 0, size: int = 1) -> None:
    """Compares the files of a checkpoint, or a rank's share of them, with their checksums.

    Raises:
        CheckpointError: One is missing or damaged.
    """
    files = sorted(read_header(path)["files"].items())
    for name, record in [pair for n, pair in enumerate(files) if n % size == rank]:
        try:
            found = _record(path / name)
        except OSError as error:
            raise CheckpointError(f"{path / name}: cannot be read: {error.strerror}") from error
        if vars(found) != record:
            raise CheckpointError(
                f"{path / name}: fails its checksum; delete this checkpoint to go on from the one "
                "before"
            )


def _check(path: Path, identity: Identity, ranks: Ranks) -> None:
    check_identity(path, identity)
    if "ranks" not in read_header(path):
        raise CheckpointError(
            f"{path}: was saved by one rank, and several cannot go on from that yet; go on with "
            "one rank, or use a checkpoint of several"
        )
    check_files(path, ranks.rank, ranks.size)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of a run by its name in a checkpoint; they alias, nothing is copied."""
    for module in model.modules():
        if isinstance(module, FSDPModule):  # an evaluation leaves the root gathered
            module.reshard()
    found: dict[str, Tensor] = {}
    for fqn, parameter in model.named_parameters():
        found[f"param.{fqn}"] = parameter.detach()
        for name, tensor in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{fqn}"] = tensor
    return found


def _check_finite(state: dict[str, Tensor]) -> None:
    for name, tensor in state.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel():
            least, most = torch.aminmax(local)
            if not (torch.isfinite(least) and torch.isfinite(most)):
                kind, _, fqn = name.partition(".")
                what = "weights" if kind == "param" else "optimizer moments"
                raise NotFiniteError(f"the {what} of {fqn} hold NaN or infinity")


def _write(partial: Path, state: dict[str, Any]) -> None:
    try:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(partial))
    except CheckpointException as error:
        raise _cause(error) from error


def _read(reader: CheckpointReader, state: dict[str, Any], no_dist: bool) -> None:
    try:
        dcp.load(state, storage_reader=reader, no_dist=no_dist)
    except CheckpointException as error:
        cause = _cause(error)
        if isinstance(cause, CheckpointError):
            raise cause from error
        raise CheckpointError(f"{reader.path}: cannot be read: {cause}") from error


def _cause(error: CheckpointException) -> BaseException:
    """What a rank met; DCP collects them by rank, with traceback."""
    failures = [failure for failure, _ in error.failures.values()]
    return next((f for f in failures if isinstance(f, OSError | CheckpointError)), failures[0])


def _records(partial: Path, ranks: Ranks) -> dict[str, FileRecord]:
    """Sizes and checksums of the files that this rank wrote."""
    names = [path.name for path in partial.glob(f"__{ranks.rank}_*.distcp")]
    if ranks.is_root:
        names.append(METADATA)
    return {name: _record(partial / name) for name in sorted(names)}


def _record(path: Path) -> FileRecord:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in _pieces(file):
            digest.update(piece)
        return FileRecord(os.fstat(file.fileno()).st_size, digest.hexdigest())


def _pieces(file: Any) -> Iterator[bytes]:
    while piece := file.read(_CHUNK):
        yield piece
