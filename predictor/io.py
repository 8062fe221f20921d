"""Predictor directories: `weights.safetensors`, `predictor.json`, `card.json`; no code.

`predictor.json` is written last and carries the digest of the weights, so a directory that was cut
while being written, or put together from two predictors, is told from a sound one. Pickles are
never read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

if TYPE_CHECKING:
    from predictor.features import Structure
    from predictor.model import Predictor

FORMAT = "odc-predictor/1"
HEADER, WEIGHTS, CARD = "predictor.json", "weights.safetensors", "card.json"
CODE_SUFFIXES = {".pkl", ".pickle", ".pt", ".pth", ".joblib", ".bin"}
CODE_PREFIXES = (b"\x80", b"PK\x03\x04", b"\x93NUMPY")


class PredictorError(ValueError):
    """A predictor directory is missing, incomplete, damaged or of another format."""


class PredictorMismatchError(PredictorError):
    """The predictor was made for a model with other sets or experts."""


def write_predictor(
    directory: str | os.PathLike[str],
    header: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    card: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a predictor directory, each file atomically and the header last.

    Args:
        directory: made if it does not exist; the files of an earlier predictor in it are replaced.
        header: kind, structure and settings; format and digest are added here.
        arrays: the weights by name.
        card: the model card, if there is one.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    weights = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    digest = hashlib.sha256(weights).hexdigest()
    _replace(path / WEIGHTS, weights)
    if card is not None:
        _replace(path / CARD, _json_bytes(card))
    else:
        (path / CARD).unlink(missing_ok=True)
    _replace(path / HEADER, _json_bytes({"format": FORMAT, "weights_sha256": digest, **header}))
    return path


def read_predictor(
    directory: str | os.PathLike[str],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads and checks a predictor directory; returns its header and its arrays.

    Raises:
        PredictorError: something is missing, damaged, of another format, or a pickle.
    """
    path = Path(directory)
    header = _read_header(path)
    try:
        weights = (path / WEIGHTS).read_bytes()
    except OSError as error:
        raise PredictorError(f"{path / WEIGHTS} cannot be read ({error}); {_AGAIN}") from error
    if weights.startswith(CODE_PREFIXES):
        raise PredictorError(
            f"{path / WEIGHTS} is a pickle or an archive; expected safetensors. Files that can "
            f"hold code are never read; {_AGAIN}"
        )
    if hashlib.sha256(weights).hexdigest() != header["weights_sha256"]:
        raise PredictorError(
            f"{path / WEIGHTS} ({len(weights)} bytes) is not the file that {HEADER} was written "
            f"for; {_AGAIN}"
        )
    try:
        arrays = load(weights)
    except SafetensorError as error:
        raise PredictorError(f"{path / WEIGHTS} is not safetensors ({error}); {_AGAIN}") from error
    broken = sorted(name for name, array in arrays.items() if not np.isfinite(array).all())
    if broken:
        raise PredictorError(
            f"{path / WEIGHTS} has values that are not finite in {broken}; {_AGAIN}"
        )
    if (path / CARD).exists():
        read_card(path)  # nothing here needs it; damage to one file may be damage to the folder
    return header, arrays


def read_card(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The model card of a predictor directory.

    Raises:
        PredictorError: there is none, or it is not JSON.
    """
    return _read_json(Path(directory) / CARD)


def load_predictor(
    directory: str | os.PathLike[str], structure: Structure | None = None
) -> Predictor:
    """Loads the predictor of a directory made by `train_predictor` or `Predictor.save`.

    Args:
        directory: the predictor directory.
        structure: sets and experts of the model it shall serve; None skips the comparison.

    Raises:
        PredictorError: the directory is missing, incomplete, damaged or of another format.
        PredictorMismatchError: it was made for another structure.
    """
    from predictor.features import Structure as Sets
    from predictor.model import predictor_class

    header, arrays = read_predictor(directory)
    try:
        made_for = Sets.from_json(header["structure"])
        predictor = predictor_class(header["kind"])(made_for, **header["settings"])
    except (KeyError, TypeError, ValueError) as error:
        raise PredictorError(
            f"{Path(directory) / HEADER} is damaged ({error}); {_AGAIN}"
        ) from error
    if structure is not None:
        check_structure(directory, made_for, structure)
    try:
        predictor.set_arrays(arrays)
    except ValueError as error:
        raise PredictorError(f"{Path(directory) / WEIGHTS}: {error}; {_AGAIN}") from error
    return predictor


def check_structure(
    directory: str | os.PathLike[str], made_for: Structure, structure: Structure
) -> None:
    """Raises PredictorMismatchError unless both structures are the same."""
    if made_for.hash != structure.hash:
        raise PredictorMismatchError(
            f"the predictor in {directory} was made for a model with {describe(made_for)}; "
            f"expected {describe(structure)}. Profile this model and train a predictor from its "
            f"traces (odc predictor train), or choose predictor: none"
        )


def describe(structure: Structure) -> str:
    """A structure in a few words, for messages."""
    members = sorted(set(structure.members))
    each = f"{members[0]}" if len(members) == 1 else f"{members[0]} to {members[-1]}"
    return f"{structure.num_sets} sets of {each} experts (structure {structure.hash})"


_AGAIN = "train the predictor again"


def _read_header(path: Path) -> dict[str, Any]:
    if not (path / HEADER).is_file():
        code = sorted(p.name for p in path.glob("*") if p.suffix in CODE_SUFFIXES)
        found = f"; found {code}, which can hold code and are never read" if code else ""
        raise PredictorError(
            f"{path} holds no {HEADER}{found}; expected a folder made by odc predictor train"
        )
    header = _read_json(path / HEADER)
    if header.get("format") != FORMAT:
        raise PredictorError(
            f"{path / HEADER} has format {header.get('format')!r}, expected {FORMAT!r}; {_AGAIN}"
        )
    if not isinstance(header.get("weights_sha256"), str):
        raise PredictorError(f"{path / HEADER} lacks weights_sha256; {_AGAIN}")
    return header


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PredictorError(f"{path} cannot be read as JSON ({error}); {_AGAIN}") from error
    if not isinstance(content, dict):
        raise PredictorError(f"{path} holds no JSON object; {_AGAIN}")
    return content


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _replace(path: Path, content: bytes) -> None:
    """Writes beside the file and renames, so that readers see the old file or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
