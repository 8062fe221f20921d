"""Hugging Face safetensors folders in and out of a model, sharded, paged or plain, without a copy.

A rank reads and writes the byte ranges of its own spans (`safetensors_file.py`), straight between
file and tensor; nothing travels between ranks but errors. Gathering tensors for one writer would
need memory for one tensor and send all of them; ranges need neither, and let all ranks write at
once. The price: all ranks must see one file system.

A paged model is read and written group by group: a group is pinned while its bytes pass. What the
tensors are called in files, and which elements lie where, is said by `tensor_names.py`.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from odc.errors import CheckpointError
from odc.fsdp.fsdp_module import FSDPModule
from odc.fsdp.paged_module import PagedModule
from odc.fsdp.ragged_shard import axis_placements, own_rank, spans_of
from odc.fsdp.safetensors_file import (
    INDEX,
    NAMES,
    SINGLE,
    Entry,
    find_files,
    lay_out,
    read_entries,
    read_span,
    write_span,
)
from odc.fsdp.tensor_names import Piece, form_of, forms, num_experts_of
from odc.sizes import parse_size

T = TypeVar("T")
WRAPPERS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")


class LoadReport(NamedTuple):
    """Names that one side had and the other did not."""

    missing: list[str]
    unexpected: list[str]


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of the model.

    Attributes:
        names: all of them, where it is tied.
        tensor: the parameter or buffer.
        num_experts: of its layer, where it belongs to one expert of an `ExpertList`; else 0.
    """

    names: list[str]
    tensor: Tensor
    num_experts: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @contextmanager
    def pinned(self, write: bool = False) -> Iterator[None]:
        """Its values are there meanwhile, also where they live in pages."""
        group = getattr(self.tensor, "_group", None)
        if group is None or group.runtime is None:  # of a model that is being paged: pinned
            yield
            return
        with group.runtime.resident([group], write=write):
            yield

    def span(self) -> tuple[Tensor, int]:
        """(this rank's elements, the first one's place in the whole tensor)."""
        if not isinstance(self.tensor, DTensor):
            return self.tensor.detach(), 0
        mesh = self.tensor.device_mesh
        placements = axis_placements(mesh, self.tensor.placements)
        ranks = mesh.size(mesh.ndim - 1)
        low, _ = spans_of(placements[-1], self.tensor.shape, ranks)[own_rank(mesh)]
        return self.tensor._local_tensor.detach(), low

    def is_mine(self) -> bool:
        """Whether this rank writes its span: the first of those that hold the same one."""
        if not isinstance(self.tensor, DTensor):
            return _rank() == 0
        coordinate = self.tensor.device_mesh.get_coordinate()
        assert coordinate is not None, "a rank outside of the mesh has no span"
        replicated = [p.is_replicate() for p in self.tensor.placements]
        return not any(c for c, same in zip(coordinate, replicated, strict=True) if same)


# -- loading -------------------------------------------------------------------------------------


def load_safetensors(
    model: nn.Module, folder: str | os.PathLike[str], *, strict: bool = True
) -> LoadReport:
    """Reads a folder's weights into a model, every rank its own spans; dtypes are converted.

    Peak extra memory is 4 MiB where dtype or device differ, and none where they agree. All ranks
    call it, and all raise if one does.

    Args:
        model: sharded by `fully_shard` (odc's or torch's with `Shard(0)`), a paged or a plain one.
        folder: holds `model.safetensors`, or the index of several files; or one such file.
        strict: names of one side only are an error.

    Returns:
        Names of one side only, empty where `strict`.

    Raises:
        CheckpointError: lists all tensors that are missing, unexpected or of another shape; or a
            file is damaged. The model is unchanged then, unless a file ends while it is read.
    """
    held = tensors_of(model)

    def prepare() -> tuple[list[tuple[Held, list[tuple[Piece, Entry]]]], LoadReport]:
        entries = read_entries(find_files(Path(folder)))
        metas = [one.names[0] for one in held if one.tensor.is_meta]
        return match(model, held, entries, strict, str(folder), metas)

    matched, report = _together(prepare)

    def read() -> None:
        for one, pieces in matched:
            with one.pinned(write=True):
                load_one(one, pieces)

    _together(read)
    return report


def match(
    model: nn.Module,
    held: list[Held],
    entries: dict[str, Entry],
    strict: bool,
    folder: str,
    metas: Sequence[str] = (),
) -> tuple[list[tuple[Held, list[tuple[Piece, Entry]]]], LoadReport]:
    """Finds for every tensor of a model where its elements lie; `metas` are refused.

    Raises:
        CheckpointError: lists all that does not fit.
    """
    found = []
    used: set[str] = set()
    missing, shapes = [], []
    for one in held:
        pieces = _pieces_in(one, entries)
        if pieces is None:
            missing.append(one.names[0])
            continue
        used.update(one.names, (piece.name for piece in pieces))
        shapes += [
            f"{piece.name}: {entries[piece.name].shape} in the file, {piece.shape} in the model"
            for piece in pieces
            if entries[piece.name].shape != piece.shape
        ]
        found.append((one, [(piece, entries[piece.name]) for piece in pieces]))
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = [
        name
        for name in sorted(entries.keys() - used)
        if not any(re.search(pattern, name) for pattern in ignored)
    ]
    problems = [
        f"{title} ({len(names)}): {', '.join(names)}"
        for title, names, counts in (
            ("missing from the file", missing, strict),
            ("not in the model", unexpected, strict),
            ("of another shape", shapes, True),
            ("on the meta device; call model.to_empty(device=...) first", metas, True),
        )
        if names and counts
    ]
    if problems:
        raise CheckpointError("\n".join([f"{folder} does not fit {_class(model)}:", *problems]))
    return found, LoadReport(missing, unexpected)


def _pieces_in(one: Held, entries: dict[str, Entry]) -> list[Piece] | None:
    """The file's tensors that make up one of the model; `None` if it lacks some."""
    for name in one.names:
        for pieces in forms(name, one.shape, one.num_experts):
            if all(piece.name in entries for piece in pieces):
                return pieces
    return None


def load_one(one: Held, pieces: list[tuple[Piece, Entry]]) -> None:
    """Reads this rank's span of a tensor from its pieces."""
    local, low = one.span()
    flat = local.view(-1) if local.is_contiguous() else local.new_empty(local.numel())
    for piece, entry in pieces:
        first, last = _meet(piece, low, flat.numel())
        if first < last:
            read_span(entry, piece.begin + first - piece.low, flat[first - low : last - low])
    if not local.is_contiguous():
        local.copy_(flat.view(local.shape))
    torch.autograd.graph.increment_version(local)


def _meet(piece: Piece, low: int, numel: int) -> tuple[int, int]:
    """Elements [first, last) of the model's tensor that are in a piece and in a span."""
    return max(low, piece.low), min(low + numel, piece.low + piece.numel)


# -- saving --------------------------------------------------------------------------------------


def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    dtype: torch.dtype | None = None,
    beside: Sequence[Path] = (),
) -> None:
    """Writes a folder that transformers loads; every rank writes its own spans.

    Tied weights are written once, and a Hugging Face model's configuration beside them. The folder
    appears when it is complete: it is written under another name beside it. All ranks call it and
    all must see the folder; all raise if one does. Extra memory: none on the CPU, 4 MiB elsewhere.

    Args:
        model: as in `load_safetensors`.
        folder: new or empty, unless `overwrite`.
        max_shard_size: of a file; a larger tensor gets a file of its own.
        overwrite: exchange the weights of a folder that is there; its other files are kept.
        dtype: of floating-point tensors in the files; by default the model's.
        beside: other files to copy into the folder.

    Raises:
        CheckpointError: the folder is not empty, is not shared by all ranks, or a tensor lies on
            the meta device or has a dtype that the format lacks.
    """
    target = Path(folder).absolute()
    partial = target.parent / f".{target.name}.partial"
    limit = parse_size(max_shard_size)
    held = tensors_of(model)
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    pieces = [form_of(one.names[0], one.shape, one.num_experts, model_type) for one in held]

    def plan() -> list[Any]:
        _check_saving(held)
        return _lay_out(held, pieces, partial, limit, dtype)

    layouts = _together(plan)

    def begin() -> None:
        if _rank() == 0:
            _begin(target, partial, overwrite, beside)
            _write_config(model, partial, dtype)
            for layout in layouts:
                layout.create()
            _write_index(partial, layouts)

    def write() -> None:
        for layout in layouts:
            _write_file(layout.path, layout.entries, held, pieces)

    def publish() -> None:
        if _rank() == 0:
            _publish(target, partial)

    for act in (begin, write, publish):
        _together(act)


def _check_saving(held: list[Held]) -> None:
    for one in held:
        if one.tensor.is_meta or one.tensor.dtype not in NAMES:
            raise CheckpointError(
                f"{one.names[0]} of {one.tensor.dtype} on {one.tensor.device} cannot be written"
            )


def _lay_out(
    held: list[Held],
    pieces: list[list[Piece]],
    folder: Path,
    limit: int,
    dtype: torch.dtype | None,
) -> list[Any]:
    """Fills files in the order of the model."""
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for one, parts in zip(held, pieces, strict=True):
        own = one.tensor.dtype
        kept = own if dtype is None or not own.is_floating_point else dtype
        for piece in parts:
            tensors[piece.name] = kept, piece.shape
    files: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    used = 0
    for name, (kept, shape) in tensors.items():
        num_bytes = math.prod(shape) * kept.itemsize
        if files[-1] and used + num_bytes > limit:
            files.append({})
            used = 0
        files[-1][name] = kept, shape
        used += num_bytes
    count = len(files)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    names = [SINGLE] if count == 1 else names
    return [lay_out(folder / name, inside) for name, inside in zip(names, files, strict=True)]


def _begin(target: Path, partial: Path, overwrite: bool, beside: Sequence[Path]) -> None:
    if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not overwrite)):
        raise CheckpointError(f"{target} exists and is not empty; pass overwrite=True, or another")
    shutil.rmtree(partial, ignore_errors=True)  # of a save that was interrupted
    partial.mkdir(parents=True)
    for kept in (*(target.iterdir() if target.is_dir() else ()), *beside):
        if not re.fullmatch(r"model.*\.safetensors(\.index\.json)?", kept.name):
            copy_one = shutil.copytree if kept.is_dir() else shutil.copy2
            copy_one(kept, partial / kept.name)


def _write_config(model: nn.Module, folder: Path, dtype: torch.dtype | None) -> None:
    for name in ("config", "generation_config"):
        config: Any = copy.deepcopy(getattr(model, name, None))
        if not callable(getattr(config, "save_pretrained", None)):
            continue
        if name == "config":
            config.architectures = [_class(model)]
            dtypes = {dtype or p.dtype for p in model.parameters() if p.is_floating_point()}
            if len(dtypes) == 1:
                config.dtype = str(dtypes.pop()).removeprefix("torch.")
        config.save_pretrained(folder)


def _write_index(folder: Path, layouts: list[Any]) -> None:
    if len(layouts) == 1:
        return
    entries = {name: entry for layout in layouts for name, entry in layout.entries.items()}
    index = {
        "metadata": {
            "total_parameters": sum(entry.numel for entry in entries.values()),
            "total_size": sum(entry.numel * entry.dtype.itemsize for entry in entries.values()),
        },
        "weight_map": {name: entries[name].path.name for name in sorted(entries)},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(
    path: Path, entries: dict[str, Entry], held: list[Held], pieces: list[list[Piece]]
) -> None:
    """This rank's spans of the tensors of one file."""
    try:
        file = os.open(path, os.O_WRONLY)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"rank {_rank()} does not see {path}, which rank 0 made: save to a folder that all "
            "ranks share"
        ) from error
    try:
        for one, parts in zip(held, pieces, strict=True):
            inside = [piece for piece in parts if piece.name in entries]
            if not inside or not one.is_mine():
                continue
            with one.pinned():
                local, low = one.span()
                flat = local.reshape(-1)
                for piece in inside:
                    first, last = _meet(piece, low, flat.numel())
                    if first < last:
                        span = flat[first - low : last - low]
                        at = piece.begin + first - piece.low
                        write_span(file, entries[piece.name], at, span)
        os.fsync(file)
    finally:
        os.close(file)


def _publish(target: Path, partial: Path) -> None:
    """The complete folder takes its name; what was there goes after it."""
    if not target.is_dir() or not any(target.iterdir()):
        os.replace(partial, target)
        return
    old = target.parent / f".{target.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    os.replace(target, old)
    os.replace(partial, target)
    shutil.rmtree(old)


# -- models and ranks ----------------------------------------------------------------------------


def tensors_of(model: nn.Module) -> list[Held]:
    """Parameters and persistent buffers, each once, in the order of the modules."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    experts = num_experts_of(model)
    found: dict[int, Held] = {}
    for name, tensor in _named(model):
        one = found.setdefault(id(tensor), Held([], tensor, experts.get(id(tensor), 0)))
        one.names.append(name)
    return list(found.values())


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        parts = [part for part in prefix.split(".") if part and part not in WRAPPERS]
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield ".".join([*parts, name]), tensor


def _class(model: nn.Module) -> str:
    """The name that the model's class had before it was sharded or paged."""
    own = type(model)
    changed = isinstance(model, FSDPModule | PagedModule)
    return own.__mro__[2].__name__ if changed else own.__name__


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _together(act: Callable[[], T]) -> T:
    """Runs it on all ranks, of which each raises what the first one that failed says."""
    result: Any = None
    failed: Exception | None = None
    try:
        result = act()
    except (OSError, CheckpointError) as error:
        failed = error
    if dist.is_available() and dist.is_initialized():
        told: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(told, None if failed is None else str(failed))
        others = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
        if others and failed is None:
            raise CheckpointError(others[0])
    if failed is not None:
        raise CheckpointError(str(failed)) from failed
    return result
