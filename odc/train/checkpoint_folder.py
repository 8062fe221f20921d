"""The folder of a checkpoint: its name, what makes it complete, and its header.

    CHECKPOINTS/step-000100/checkpoint.json   step, identity, random state, sizes and checksums

The header is written last, and the folder is written beside its place and renamed into it, so that
what bears the name is complete. The files beside the header are those of `checkpoint.py` (one
process, pages) or of `rank_checkpoint.py` (several ranks); the header says whose.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import odc
from odc.errors import CheckpointError, OdcError
from odc.train.config_model import ModelConfig
from odc.train.tensor_file import FileRecord

FORMAT = "odc-checkpoint/1"
HEADER = "checkpoint.json"
_NAME = re.compile(r"step-(\d{6,})")
# What may differ between a checkpoint's model and the one that goes on from it.
_FREE_MODEL_KEYS = {"path", "init_std", "balance_coef", "router_z_coef"}


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
        adapter: What an adapter is and which base it belongs to; empty where the whole model is
            trained. With an adapter a checkpoint holds what is trained, and not the base.
    """

    structure_hash: str
    corpus_hash: str
    model: Mapping[str, Any]
    adapter: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        config: ModelConfig,
        corpus_hash: str,
        adapter: Mapping[str, Any] | None = None,
    ) -> "Identity":
        """Returns the identity of a model that is trained on a corpus."""
        return cls(
            structure_hash=structure_hash(model),
            corpus_hash=corpus_hash,
            model=model_keys(config),
            adapter=adapter or {},
        )


def model_keys(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of section `model` that change what the model computes."""
    return {k: v for k, v in config.shown().items() if k not in _FREE_MODEL_KEYS}


def structure_hash(model: nn.Module) -> str:
    """Returns 16 hex digits that change with any parameter's name, shape or dtype."""
    shapes = [(fqn, list(p.shape), str(p.dtype)) for fqn, p in model.named_parameters()]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]


def latest(folder: Path) -> Path | None:
    """Returns the newest complete checkpoint in a folder, or `None`."""
    return next(iter(complete(folder)), None)


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
    return int(read_header(path)["step"])


def identity_in(path: Path, model: nn.Module) -> Identity:
    """Returns the identity that a checkpoint has of itself, for whatever corpus `model` is of.

    Raises:
        CheckpointError: It is damaged.
    """
    header = read_header(path)
    return Identity(
        structure_hash=structure_hash(model),
        corpus_hash=header["corpus_hash"],
        model=header["model"],
    )


def check_identity(path: Path, identity: Identity) -> None:
    """Refuses a checkpoint of another model, adapter, base or corpus.

    Raises:
        CheckpointError: Says what differs.
    """
    header = read_header(path)
    _check_keys(path, "model", header["model"], identity.model)
    _check_adapter(path, header.get("adapter", {}), identity.adapter)
    if header["structure_hash"] != identity.structure_hash:
        raise CheckpointError(
            f"{path}: belongs to a model with other parameters (structure "
            f"{header['structure_hash']}, expected {identity.structure_hash}); "
            "use the model, data.vocab_size and train.dtype that it was saved with"
        )
    if header["corpus_hash"] != identity.corpus_hash:
        raise CheckpointError(
            f"{path}: was trained on another corpus ({header['corpus_hash'][:12]}, expected "
            f"{identity.corpus_hash[:12]}); use the data section that it was saved with"
        )


def check_model(path: Path, config: ModelConfig) -> None:
    """Refuses a checkpoint of a model that computes something else.

    Raises:
        CheckpointError: Says what differs.
    """
    _check_keys(path, "model", read_header(path)["model"], model_keys(config))


def _check_keys(path: Path, section: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for key, value in own.items():
        found = saved.get(key, value)
        if found != value:
            raise CheckpointError(
                f"{path}: was saved with {section}.{key} {found}, the configuration has {value}; "
                f"use {section}.{key}={found}, or start without this checkpoint"
            )


def _check_adapter(path: Path, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if saved and not own:
        raise CheckpointError(
            f"{path}: holds an adapter and not the model that it belongs to; use "
            f"adapter.kind={saved['kind']} and the base that it was trained on"
        )
    if own and not saved:
        raise CheckpointError(
            f"{path}: holds a model and no adapter; to train an adapter on it start a new run with "
            f"adapter.base={path}"
        )
    _check_keys(path, "adapter", saved, {k: v for k, v in own.items() if k != "base"})
    if saved.get("base") != own.get("base"):
        raise CheckpointError(
            f"{path}: its adapter was trained on another base (fingerprint {saved['base']}, this "
            f"one has {own['base']}); use the model section, the seed and the adapter.base that it "
            "was trained with"
        )


# Folders.


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints, newest first."""
    if not folder.is_dir():
        return []
    named = [(int(m[1]), p) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(named, reverse=True) if is_complete(path)]


def is_complete(path: Path) -> bool:
    """Whether the header is sound and every file that it names is there in full."""
    try:
        files = read_header(path)["files"]
        return all((path / n).stat().st_size == f["num_bytes"] for n, f in files.items())
    except (CheckpointError, OSError, KeyError, TypeError):
        return False


def sweep(folder: Path) -> None:
    """Deletes what a killed process left half-written: a run has one process at a time."""
    for left in folder.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)


def put_in_place(partial: Path, final: Path) -> None:
    """Gives a complete folder its name, in the place of one that bears it already."""
    if not final.exists():
        partial.rename(final)
        return
    aside = final.with_name(f".{final.name}.{os.getpid()}.old")
    final.rename(aside)
    partial.rename(final)
    shutil.rmtree(aside, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems cannot sync a folder; their files are synced already.
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


# Header.


def write_header(
    folder: Path,
    step: int,
    identity: Identity,
    records: dict[str, FileRecord],
    ranks: int | None = None,
) -> None:
    """Writes and syncs the header; `ranks` is the number of those that wrote files, if several."""
    content: dict[str, Any] = {
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
    if identity.adapter:
        content["adapter"] = dict(identity.adapter)
    if ranks is not None:
        content["ranks"] = ranks
    text = json.dumps({"sha256": _digest(content), **content}, indent=1)
    with open(folder / HEADER, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_header(path: Path) -> dict[str, Any]:
    """Returns a checkpoint's header.

    Raises:
        CheckpointError: It is missing, damaged, or of another format.
    """
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


def restore_random_state(header: Mapping[str, Any]) -> None:
    """Sets torch's random state to that of the process that wrote the header."""
    state = np.frombuffer(base64.b64decode(header["rng"]["torch"]), np.uint8)
    torch.set_rng_state(torch.from_numpy(state.copy()))


def write_error(final: Path, error: OSError) -> CheckpointWriteError:
    """Returns the error of a checkpoint that could not be written."""
    return CheckpointWriteError(
        f"{final}: cannot write the checkpoint: {error.strerror or error}; earlier "
        "checkpoints are intact; free space or name another folder in checkpoint.dir"
    )
