"""Reads the `.metadata` of a DCP checkpoint, which is a pickle, without trusting it.

An unpickler calls what its input names. This one finds the classes that
`torch.distributed.checkpoint` writes for sharded tensors and nothing else: a file that names
anything besides is refused before that is looked up. The tensors' own files are read by
`torch.load(weights_only=True)`, as DCP does.
"""

from __future__ import annotations

import importlib
import pickle
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from odc.errors import CheckpointError

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
_CLASSES = {
    (f"{_DCP}.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
}
_DTYPES = {
    "bfloat16",
    "bool",
    "float16",
    "float32",
    "float64",
    "int16",
    "int32",
    "int64",
    "int8",
    "uint8",
}


class MetadataUnpickler(pickle.Unpickler):
    """Admits exactly the classes that DCP writes."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns an admitted class.

        Raises:
            UnpicklingError: It is none of them.
        """
        if (module, name) in _CLASSES or (module == "torch" and name in _DTYPES):
            return getattr(importlib.import_module(module), name)
        raise pickle.UnpicklingError(f"{module}.{name} is not admitted")

    def persistent_load(self, pid: Any) -> Any:
        """Raises: DCP writes none."""
        raise pickle.UnpicklingError("persistent ids are not admitted")


def load_metadata(file: IO[bytes], name: Path | str) -> Metadata:
    """Returns the metadata in an open file.

    Raises:
        CheckpointError: It is damaged, or names what DCP does not write.
    """
    try:
        found = MetadataUnpickler(file).load()
    except Exception as error:  # a pickle that was cut or changed can raise anything
        raise CheckpointError(
            f"{name}: expected the metadata of a checkpoint, got {error}; it was changed or comes "
            "from elsewhere, and is not read"
        ) from error
    if not isinstance(found, Metadata):
        raise CheckpointError(
            f"{name}: expected the metadata of a checkpoint, got {type(found).__name__}"
        )
    return found


class CheckpointReader(FileSystemReader):
    """DCP's reader, which reads the metadata through `MetadataUnpickler`."""

    @cached_property
    def metadata(self) -> Metadata:
        """The metadata, read once.

        Raises:
            CheckpointError: It is damaged, or names what DCP does not write.
        """
        path = Path(self.path) / METADATA
        with open(path, "rb") as file:
            found = load_metadata(file, path)
        for info in (found.storage_data or {}).values():
            name = info.relative_path
            if Path(name).name != name or not name.endswith(".distcp"):
                raise CheckpointError(f"{path}: names {name!r}, which is no file of a checkpoint")
        return found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata, as DCP asks for it."""
        self.metadata.storage_meta = self.metadata.storage_meta or StorageMeta()
        self.metadata.storage_meta.load_id = self.load_id
        return self.metadata
