"""The corpus as token ids: made once, kept in a cache folder, read as memory maps.

    CACHE/tokens-HASH-VOCAB-vN/
        tokenizer.json
        tokens.npy       every document's ids, one after the other, each with an end marker
        documents.npy    one row a document: end in tokens.npy, kind, draw for the split

The folder appears under its name whole or not at all, so runs that start together cannot read each
other's half-written files.
"""

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import track

from odc.errors import DataError
from odc.train.config_model import DataConfig
from odc.train.corpus import CODE, PROSE, Corpus, Document, load_corpus
from odc.train.files import user_cache_dir
from odc.train.tokenizer import Tokenizer, train_tokenizer

# Raise it when the same corpus gives other tokens.
TOKENS_VERSION = 1
KINDS = (CODE, PROSE)
_ROW = np.dtype([("end", "<i8"), ("kind", "u1"), ("draw", "<f8")])
_BATCH_DOCUMENTS = 64


@dataclass(frozen=True, kw_only=True)
class DocumentSet:
    """Some documents of a corpus, as spans of one array of token ids.

    Attributes:
        tokens: Ids of the whole corpus, one dimension; not to be written.
        starts: Start of each document in `tokens`.
        ends: End of each document, its end marker included.
        kinds: Index of each document's kind in `KINDS`.
    """

    tokens: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    kinds: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Tokens of these documents."""
        return int((self.ends - self.starts).sum())

    def __len__(self) -> int:
        """Returns the number of documents."""
        return len(self.starts)


@dataclass(frozen=True, kw_only=True)
class TokenData:
    """A corpus, tokenized and split.

    Attributes:
        tokenizer: Made from this corpus.
        corpus_hash: Hash of the files that the tokens come from.
        train: Documents to learn from.
        evaluation: Documents held back.
    """

    tokenizer: Tokenizer
    corpus_hash: str
    train: DocumentSet
    evaluation: DocumentSet


def load_tokens(config: DataConfig, given: Tokenizer | None = None) -> TokenData:
    """Reads the corpus and returns its tokens, from the cache where they were made before.

    Args:
        config: Which text, and how it is cut.
        given: The tokenizer to use; learned from the corpus where there is none.

    Raises:
        DataError: The corpus cannot be read or the cache folder cannot be written.
    """
    corpus = load_corpus(config)
    vocabulary = str(config.vocab_size) if given is None else given.hash[:24]
    name = f"tokens-{corpus.hash[:24]}-{vocabulary}-v{TOKENS_VERSION}"
    folder = cache_dir(config) / name
    parts = _read(folder, given)
    if parts is None:
        _make(corpus, config.vocab_size, folder, given)
        parts = _read(folder, given)
    if parts is None:
        raise DataError(f"{folder} cannot be read back; delete it, or set ODC_CACHE_DIR elsewhere")
    tokenizer, tokens, rows = parts
    train, evaluation = _split(tokens, rows, config.eval_fraction)
    trained_on = corpus.hash
    if given is not None:
        trained_on = hashlib.sha256((corpus.hash + given.hash).encode()).hexdigest()
    return TokenData(
        tokenizer=tokenizer, corpus_hash=trained_on, train=train, evaluation=evaluation
    )


def cache_dir(config: DataConfig) -> Path:
    """Returns the cache folder: `data.cache_dir`, or that of the user."""
    return Path(config.cache_dir).expanduser() if config.cache_dir else user_cache_dir()


def _read(folder: Path, given: Tokenizer | None) -> tuple[Tokenizer, np.ndarray, np.ndarray] | None:
    """Returns what the folder holds, or `None` where it is missing or damaged."""
    try:
        tokenizer = given or Tokenizer.load(folder / "tokenizer.json")
        tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        rows = np.load(folder / "documents.npy")
    except Exception as error:  # tokenizers raises the bare class for a file it cannot parse
        if isinstance(error, FileNotFoundError) and not folder.exists():
            return None
        shutil.rmtree(folder, ignore_errors=True)
        return None
    if rows.dtype != _ROW or not len(rows) or rows["end"][-1] != len(tokens):
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return tokenizer, tokens, rows


def _make(corpus: Corpus, vocab_size: int, folder: Path, given: Tokenizer | None) -> None:
    documents = list(corpus.documents())
    if not documents:
        raise DataError("the corpus has no text; name other files in data.corpus")
    tokenizer = given or train_tokenizer(documents, vocab_size)
    tokens, ends = _encode(documents, tokenizer)
    rows = np.empty(len(documents), dtype=_ROW)
    rows["end"] = ends
    rows["kind"] = [KINDS.index(document.kind) for document in documents]
    rows["draw"] = [_draw(document.source) for document in documents]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tokens-") as name:
            temporary = Path(name) / "done"
            temporary.mkdir()
            tokenizer.save(temporary / "tokenizer.json")
            np.save(temporary / "tokens.npy", tokens)
            np.save(temporary / "documents.npy", rows)
            if not folder.exists():
                _publish(temporary, folder)
    except OSError as error:
        raise DataError(
            f"the token cache {folder.parent} cannot be written ({error.strerror}); "
            "set data.cache_dir or ODC_CACHE_DIR to a folder that can"
        ) from error


def _publish(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError:
        # Another run made the same tokens meanwhile; its folder is as good as ours.
        if not folder.is_dir():
            raise


def _encode(documents: Sequence[Document], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    pieces = []
    for batch in _batches([document.text for document in documents]):
        for ids in tokenizer.encode_many(batch):
            ids.append(tokenizer.end_of_text)
            pieces.append(np.array(ids, dtype=dtype))
    ends = np.cumsum([len(piece) for piece in pieces])
    return np.concatenate(pieces), ends


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    starts = range(0, len(texts), _BATCH_DOCUMENTS)
    silent = not sys.stdout.isatty()
    for start in track(starts, description="tokenizing", disable=silent, transient=True):
        yield texts[start : start + _BATCH_DOCUMENTS]


def _draw(source: str) -> float:
    """A number in [0, 1) that depends on the document's file alone."""
    return int.from_bytes(hashlib.sha256(source.encode()).digest()[:6], "big") / 2**48


def _split(
    tokens: np.ndarray, rows: np.ndarray, eval_fraction: float
) -> tuple[DocumentSet, DocumentSet]:
    """Divides by file; with one side empty, the end of the longest text is held back instead."""
    ends = rows["end"].astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    held_back = rows["draw"] < eval_fraction
    if not held_back.any() or held_back.all():
        longest = int((ends - starts).argmax())
        cut = ends[longest] - max(1, int((ends - starts)[longest] * eval_fraction))
        starts = np.append(starts, cut)
        ends = np.append(ends, ends[longest])
        ends[longest] = cut
        rows = np.append(rows, rows[longest])
        held_back = np.arange(len(rows)) == len(rows) - 1
    sides = [
        DocumentSet(tokens=tokens, starts=starts[side], ends=ends[side], kinds=rows["kind"][side])
        for side in (~held_back, held_back)
    ]
    return sides[0], sides[1]
