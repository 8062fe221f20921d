"""Checkpoints: a folder for each, written whole or not at all, group by group.

    CHECKPOINTS/step-000100/
        group-0000.safetensors   parameters, both moments and step counters of one group, by fqn
        checkpoint.json          step, identity, random state, sizes and checksums; written last

A checkpoint is written beside its place and renamed into it, so that what bears the name is
complete. Bytes go from the pages to the file and back: no group is ever copied. `save`, `load` and
`latest` are the whole interface; the files behind them are nobody else's business.
"""

import base64
import contextlib
import datetime
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import odc
from odc.errors import CheckpointError, OdcError
from odc.fsdp.group import ParamGroup
from odc.fsdp.optimizer import NUM_MOMENTS, PagedAdamW
from odc.fsdp.runtime import Runtime
from odc.memory.events import Kind, Op, Phase
from odc.train.config_schema import ModelConfig
from odc.train.tensor_file import Buffers, FileRecord, TensorSpec, read_tensors, write_tensors

FORMAT = "odc-checkpoint/1"
HEADER = "checkpoint.json"
_NAME = re.compile(r"step-(\d{6,})")
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Context of passes that are no forward, as in `odc.paged`: they leave recorded orders alone.
_NO_FORWARD = -2
# What may differ between a checkpoint's model and the one that goes on from it.
_FREE_MODEL_KEYS = {"init_std", "balance_coef", "router_z_coef"}


class CheckpointWriteError(OdcError, RuntimeError):
    """A checkpoint could not be written; those before it are as they were."""


class NotFiniteError(OdcError, RuntimeError):
    """A weight or moment is NaN or infinite: no run could go on from that."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a checkpoint belongs to.

    Attributes:
        structure_hash: Hash of all parameters' names, shapes and dtypes.
        corpus_hash: What the run is trained on.
        model: Keys of section `model` that change what the model computes.
    """

    structure_hash: str
    corpus_hash: str
    model: Mapping[str, Any]

    @classmethod
    def of(cls, model: nn.Module, config: ModelConfig, corpus_hash: str) -> "Identity":
        """Returns the identity of a model that is trained on a corpus."""
        keys = {k: v for k, v in config.shown().items() if k not in _FREE_MODEL_KEYS}
        return cls(structure_hash=structure_hash(model), corpus_hash=corpus_hash, model=keys)


def structure_hash(model: nn.Module) -> str:
    """Returns 16 hex digits that change with any parameter's name, shape or dtype."""
    shapes = [(fqn, list(p.shape), str(p.dtype)) for fqn, p in model.named_parameters()]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]


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
        _sweep(folder)
        partial.mkdir()
        records = _write_groups(partial, model, optimizer)
        _write_header(partial, step, identity, records)
        _sync_folder(partial)
        _put_in_place(partial, final)
        _sync_folder(folder)
    except NotFiniteError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointWriteError(
            f"{final}: cannot write the checkpoint: {error.strerror or error}; earlier "
            "checkpoints are intact; free space or name another folder in checkpoint.dir"
        ) from error
    for old in _complete(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def latest(folder: Path) -> Path | None:
    """Returns the newest complete checkpoint in a folder, or `None`."""
    return next(iter(_complete(folder)), None)


def find(path: Path) -> Path:
    """Returns the checkpoint that a path means: itself, or the newest of a run or a folder.

    Raises:
        CheckpointError: There is none.
    """
    if (path / HEADER).is_file():
        return path
    found = latest(path / "checkpoints") or latest(path)
    if found is None:
        raise CheckpointError(
            f"{path}: holds no complete checkpoint; expected a checkpoint's folder (with "
            f"{HEADER}), or a run that was made with checkpoint.every"
        )
    return found


def read_step(path: Path) -> int:
    """Returns the number of steps that a checkpoint has behind it.

    Raises:
        CheckpointError: It is damaged.
    """
    return int(_read_header(path)["step"])


def check_identity(path: Path, identity: Identity) -> None:
    """Refuses a checkpoint of another model or corpus.

    Raises:
        CheckpointError: Says what differs.
    """
    header = _read_header(path)
    for key, value in identity.model.items():
        saved = header["model"].get(key, value)
        if saved != value:
            raise CheckpointError(
                f"{path}: was saved with model.{key} {saved}, the configuration has {value}; "
                f"use model.{key}={saved}, or start without this checkpoint"
            )
    if header["structure_hash"] != identity.structure_hash:
        raise CheckpointError(
            f"{path}: belongs to a model with other parameters (structure "
            f"{header['structure_hash']}, expected {identity.structure_hash}); "
            "use the model and data.vocab_size that it was saved with"
        )
    if header["corpus_hash"] != identity.corpus_hash:
        raise CheckpointError(
            f"{path}: was trained on another corpus ({header['corpus_hash'][:12]}, expected "
            f"{identity.corpus_hash[:12]}); use the data section that it was saved with"
        )


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
    header = _read_header(path)
    runtime = _runtime(model)
    runtime.manager.begin_pass(_NO_FORWARD)
    for index, group in enumerate(runtime.groups):
        name = _file_name(index)
        if name not in header["files"]:
            raise CheckpointError(f"{path / HEADER}: lists no {name}; the checkpoint is damaged")
        read_tensors(
            path / name,
            _specs(group),
            _group_bytes(runtime, optimizer, group, Op.WRITE),
            FileRecord(**header["files"][name]),
        )
    state = np.frombuffer(base64.b64decode(header["rng"]["torch"]), np.uint8)
    torch.set_rng_state(torch.from_numpy(state.copy()))
    return int(header["step"])


# Groups.


def _runtime(model: nn.Module) -> Runtime:
    return model._odc_runtime  # type: ignore[return-value]


def _write_groups(folder: Path, model: nn.Module, optimizer: PagedAdamW) -> dict[str, FileRecord]:
    runtime = _runtime(model)
    runtime.manager.begin_pass(_NO_FORWARD)
    records = {}
    for index, group in enumerate(runtime.groups):
        buffers = _group_bytes(runtime, optimizer, group, Op.READ)
        name = _file_name(index)
        records[name] = write_tensors(folder / name, _specs(group), buffers)
    return records


def _file_name(index: int) -> str:
    return f"group-{index:04d}.safetensors"


def _specs(group: ParamGroup) -> list[TensorSpec]:
    kinds = ["param"]
    if group.trainable:
        kinds += _MOMENTS
    specs = [
        TensorSpec(f"{k}.{s.fqn}", s.dtype, tuple(s.shape)) for k in kinds for s in group.slots
    ]
    if group.trainable:
        specs += [TensorSpec(f"step.{s.fqn}", torch.float32, ()) for s in group.slots]
    return specs


def _group_bytes(runtime: Runtime, optimizer: PagedAdamW, group: ParamGroup, op: Op) -> Buffers:
    """Yields the bytes of each of a group's tensors, pinned while they are used.

    One kind at a time: that much fits every budget in which the group can be trained.
    """
    manager = runtime.manager
    kinds = [(Kind.PARAMETER, 1)]
    if group.trainable:
        kinds.append((Kind.MOMENT, NUM_MOMENTS))
    for kind, num_slots in kinds:
        manager.access(group.group, [(kind, op)], Phase.OTHER)
        try:
            for slot in range(num_slots):
                for index in range(len(group.slots)):
                    view = group.view(kind, index, slot)
                    if op == Op.READ:
                        _check_finite(kind, group.slots[index].fqn, view)
                    yield _bytes(view)
        finally:
            manager.release(group.group, kind)
    if group.trainable:
        for counter in optimizer.steps_of(group):
            yield _bytes(counter)


def _check_finite(kind: Kind, fqn: str, tensor: torch.Tensor) -> None:
    """Smallest and largest are NaN where any number is, and need no copy, as `isfinite` would."""
    if tensor.numel() and tensor.is_floating_point():
        least, most = torch.aminmax(tensor.detach())
        if not (torch.isfinite(least) and torch.isfinite(most)):
            what = "weights" if kind == Kind.PARAMETER else "optimizer moments"
            raise NotFiniteError(f"the {what} of {fqn} hold NaN or infinity")


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


# Folders.


def _complete(folder: Path) -> list[Path]:
    """Complete checkpoints, newest first."""
    if not folder.is_dir():
        return []
    named = [(int(m[1]), p) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(named, reverse=True) if _is_complete(path)]


def _is_complete(path: Path) -> bool:
    try:
        files = _read_header(path)["files"]
        return all((path / n).stat().st_size == f["num_bytes"] for n, f in files.items())
    except (CheckpointError, OSError, KeyError, TypeError):
        return False


def _sweep(folder: Path) -> None:
    """Deletes what a killed process left half-written: a run has one process at a time."""
    for left in folder.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)


def _put_in_place(partial: Path, final: Path) -> None:
    if not final.exists():
        partial.rename(final)
        return
    aside = final.with_name(f".{final.name}.{os.getpid()}.old")
    final.rename(aside)
    partial.rename(final)
    shutil.rmtree(aside, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems cannot sync a folder; their files are synced already.
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


# Header.


def _write_header(
    folder: Path, step: int, identity: Identity, records: dict[str, FileRecord]
) -> None:
    content = {
        "format": FORMAT,
        "step": step,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "structure_hash": identity.structure_hash,
        "corpus_hash": identity.corpus_hash,
        "model": dict(identity.model),
        "rng": {"torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()},
        "versions": {"odc": odc.__version__, "torch": torch.__version__},
        "files": {name: vars(record) for name, record in records.items()},
    }
    text = json.dumps({"sha256": _digest(content), **content}, indent=1)
    with open(folder / HEADER, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_header(path: Path) -> dict[str, Any]:
    file = path / HEADER
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file}: cannot be read as JSON ({error}); the checkpoint is incomplete or damaged"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise CheckpointError(f"{file}: expected format {FORMAT}, got {found!r}")
    if content.pop("sha256", None) != _digest(content):
        raise CheckpointError(
            f"{file}: fails its checksum; delete this checkpoint to go on from the one before"
        )
    return content
