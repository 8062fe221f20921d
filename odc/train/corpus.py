"""The training text: the running Python's standard library, or files that the user names.

The default corpus needs no download and is never copied: it is read where Python is installed. Each
source file gives two documents: the file itself (`code`) and the docstrings gathered from it
(`prose`). Text of the user's own gives one document a file.

A corpus is known by a hash over the names and contents of its files in sorted order, so a run can
say exactly what it was trained on. Documents are made only when they are asked for: with the hash
alone, tokens that were made earlier are found again (see `tokens.py`).
"""

import ast
import hashlib
import inspect
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from odc.errors import DataError
from odc.train.config_model import DataConfig

# Raise it when documents are made from files in another way: old tokens are then not found.
CORPUS_VERSION = 1
STDLIB = "stdlib"
CODE, PROSE = "code", "prose"

# Of the standard library: tests, vendored packages, and tables that are data rather than text.
_NO_LIBRARY_TEXT = frozenset(
    {
        "dist-packages",
        "encodings",
        "idle_test",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)
_CODE_SUFFIXES = frozenset(
    {".c", ".cc", ".cpp", ".cu", ".go", ".h", ".hpp", ".java", ".js", ".py", ".rs", ".sh", ".ts"}
)
# Shorter gatherings of docstrings teach nothing.
_MIN_PROSE_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text.

    Attributes:
        source: Name of the file it came from. Documents of one file share it, and so stay on one
            side of the split into training and evaluation text.
        kind: `code` or `prose`.
        text: The text itself.
    """

    source: str
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a corpus, read."""

    name: str
    path: Path
    content: bytes


class Corpus:
    """The files of a corpus, in the order of their names.

    Args:
        files: The files; read already, so that the hash is that of what will be trained on.
        with_docstrings: Whether a file's docstrings make a document of their own.
    """

    def __init__(self, files: Sequence[SourceFile], *, with_docstrings: bool) -> None:
        self._files = sorted(files, key=lambda file: (file.name, file.content))
        self._with_docstrings = with_docstrings
        self.num_bytes = sum(len(file.content) for file in files)
        digest = hashlib.sha256(f"{CORPUS_VERSION}:{with_docstrings}".encode())
        for file in self._files:
            # Lengths keep a border between name and content from being shifted unseen.
            digest.update(f"\0{len(file.name)}:{file.name}:{len(file.content)}:".encode())
            digest.update(file.content)
        self.hash = digest.hexdigest()

    def __len__(self) -> int:
        """Returns the number of files."""
        return len(self._files)

    def documents(self) -> Iterator[Document]:
        """Yields the documents in the order of their files' names.

        Raises:
            DataError: A file is not UTF-8 text.
        """
        for file in self._files:
            text = _decoded(file)
            kind = CODE if file.path.suffix in _CODE_SUFFIXES else PROSE
            if text.strip():
                yield Document(source=file.name, kind=kind, text=text)
            if self._with_docstrings:
                prose = docstrings(text)
                if len(prose) >= _MIN_PROSE_CHARS:
                    yield Document(source=file.name, kind=PROSE, text=prose)


def load_corpus(config: DataConfig) -> Corpus:
    """Reads the corpus that the configuration names.

    Raises:
        DataError: A path does not exist, cannot be read, or there is no text in it.
    """
    is_stdlib = tuple(config.corpus) == (STDLIB,)
    if is_stdlib:
        files = list(_stdlib_files())
    else:
        files = [
            file for name in config.corpus for file in _named_files(Path(name), config.extensions)
        ]
    if not files:
        raise DataError(
            f"this Python's library in {sysconfig.get_path('stdlib')} has no sources; "
            "name files or folders of text in data.corpus"
        )
    if config.max_bytes is not None:
        files = _bounded(files, config.max_bytes)
    return Corpus(files, with_docstrings=is_stdlib)


def docstrings(source: str) -> str:
    """Returns the docstrings of a module, its classes and functions, in the order they stand.

    A source that this Python cannot parse has none.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    found: list[str] = []
    _gather(tree, "", found)
    return "\n\n".join(found) + "\n" if found else ""


def _gather(node: ast.AST, name: str, found: list[str]) -> None:
    """Statements only are walked: expressions are most of a tree and hold no docstring."""
    body = getattr(node, "body", None)
    if not isinstance(body, list) or not body:
        return
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        first = body[0].value if isinstance(body[0], ast.Expr) else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            text = inspect.cleandoc(first.value)
            found.append(f"{name}: {text}" if name else text)
    for child in body:
        own = getattr(child, "name", "")
        _gather(child, f"{name}.{own}" if name and own else own or name, found)


def _stdlib_files() -> Iterator[SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in _walk(root, _NO_LIBRARY_TEXT):
        if path.suffix == ".py":
            name = path.relative_to(root).as_posix()
            yield SourceFile(name=name, path=path, content=_read(path))


def _walk(folder: Path, left_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yields the files below a folder, sorted, without hidden files and caches.

    Links to folders are not followed: they may lead back up.
    """
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == "__pycache__" or path.name in left_out:
            continue
        if path.is_file():
            yield path
        elif path.is_dir() and not path.is_symlink():
            yield from _walk(path, left_out)


def _named_files(path: Path, extensions: Sequence[str]) -> Iterator[SourceFile]:
    if path.is_file():
        content = _read(path)
        if not content.strip():
            raise DataError(f"{path} is empty; name a file with text in data.corpus")
        yield SourceFile(name=path.name, path=path, content=content)
        return
    if not path.is_dir():
        raise DataError(
            f"{path} does not exist; data.corpus takes `{STDLIB}`, or files and folders of text"
        )
    wanted = {
        extension if extension.startswith(".") else f".{extension}" for extension in extensions
    }
    files = [found for found in _walk(path) if found.suffix in wanted]
    contents = {found: content for found in files if (content := _read(found)).strip()}
    if not contents:
        raise DataError(
            f"{path} has no text in files named {', '.join(sorted(wanted))}; "
            "name other files in data.corpus, or their endings in data.extensions"
        )
    for found, content in contents.items():
        name = f"{path.name}/{found.relative_to(path).as_posix()}"
        yield SourceFile(name=name, path=found, content=content)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _decoded(file: SourceFile) -> str:
    try:
        return file.content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{file.path} is not UTF-8 text (byte {error.start})") from error


def _bounded(files: Sequence[SourceFile], max_bytes: int) -> list[SourceFile]:
    """Keeps files in the order of their names' hashes, a fair sample, while they fit."""
    kept: list[SourceFile] = []
    left = max_bytes
    for file in sorted(files, key=lambda file: hashlib.sha256(file.name.encode()).digest()):
        if len(file.content) <= left:
            kept.append(file)
            left -= len(file.content)
    if not kept:
        raise DataError(
            f"no file of the corpus fits data.max_bytes of {max_bytes} bytes; "
            f"the smallest has {min(len(file.content) for file in files)}"
        )
    return kept
