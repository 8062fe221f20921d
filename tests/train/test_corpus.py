"""Claims about the corpus, its tokenizer and the cache of tokens."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc.errors import DataError
from odc.train.config_model import DataConfig
from odc.train.corpus import CODE, PROSE, Document, docstrings, load_corpus
from odc.train.tokenizer import END_OF_TEXT, Tokenizer, train_tokenizer
from odc.train.tokens import KINDS, cache_dir, load_tokens

MODULE = '''"""What the module is."""

class Cache:
    """Keeps
        things."""

    def get(self):
        """Gets one."""
        return """no docstring"""

async def later():
    "Waits."
'''


def texts(tmp_path: Path, num_files: int = 40) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(num_files):
        body = f"Text number {index} speaks of pages, frames and {'caches ' * (index % 7 + 1)}.\n"
        (folder / f"text{index:02}.txt").write_text(body * 20, encoding="utf-8")
    return folder


@pytest.fixture
def data(tmp_path) -> DataConfig:
    return DataConfig(
        corpus=str(texts(tmp_path)),
        vocab_size=300,
        eval_fraction=0.2,
        cache_dir=str(tmp_path / "cache"),
    )


@pytest.fixture(scope="module")
def library():
    return load_corpus(DataConfig())


def test_the_standard_library_is_read_where_it_lies_without_tests_and_tables(library):
    assert len(library) > 300 and library.num_bytes > 5_000_000
    sources = {document.source for document in load_corpus(DataConfig(max_bytes="2MB")).documents()}
    names = {file.name for file in library._files}
    assert sources <= names and {"dataclasses.py", "email/message.py"} <= names
    parts = {part for name in names for part in name.split("/")[:-1]}
    assert not parts & {"test", "tests", "lib2to3", "site-packages", "__pycache__", "encodings"}


def test_the_library_gives_code_and_the_prose_of_its_docstrings():
    documents = list(load_corpus(DataConfig(max_bytes="2MB")).documents())
    kinds = {document.kind for document in documents}
    assert kinds == {CODE, PROSE}
    prose = [document for document in documents if document.kind == PROSE]
    code = {document.source: document.text for document in documents if document.kind == CODE}
    assert len(prose) > 20 and all(document.source in code for document in prose)


def test_docstrings_come_in_the_order_they_stand_and_other_strings_do_not():
    assert docstrings(MODULE) == (
        "What the module is.\n\nCache: Keeps\nthings.\n\nCache.get: Gets one.\n\nlater: Waits.\n"
    )
    assert docstrings("def broken(:") == "" and docstrings("x = 1") == ""


def test_docstrings_inside_conditions_and_handlers_keep_the_name_of_their_scope():
    nested = (
        'if True:\n    class A:\n        """One."""\n        if x:\n            def f(): "Two."\n'
    )
    assert docstrings(nested) == "A: One.\n\nA.f: Two.\n"


def test_the_hash_depends_on_names_and_contents_alone(tmp_path):
    folder = texts(tmp_path, 3)
    config = DataConfig(corpus=[str(folder)])
    before = load_corpus(config).hash
    (folder / "text01.txt").touch()
    assert load_corpus(config).hash == before
    listed = DataConfig(corpus=[str(p) for p in sorted(folder.iterdir(), reverse=True)])
    assert (
        load_corpus(listed).hash
        == load_corpus(DataConfig(corpus=[str(p) for p in sorted(folder.iterdir())])).hash
    )
    (folder / "text01.txt").rename(folder / "text09.txt")
    renamed = load_corpus(config).hash
    (folder / "text09.txt").write_text("other")
    assert len({before, renamed, load_corpus(config).hash}) == 3


def test_folders_give_files_of_the_named_endings_and_files_are_taken_as_named(tmp_path):
    folder = texts(tmp_path, 2)
    (folder / "test").mkdir()
    (folder / "test" / "deep.py").write_text("x = 1\n")
    (folder / "picture.png").write_bytes(b"\x89PNG\xff")
    (folder / ".hidden.txt").write_text("no")
    (folder / "blank.txt").write_text(" \n")
    (tmp_path / "NOTES").write_text("Some notes.")
    config = DataConfig(corpus=[str(folder), str(tmp_path / "NOTES")])
    found = {document.source: document.kind for document in load_corpus(config).documents()}
    assert found == {
        "texts/text00.txt": PROSE,
        "texts/text01.txt": PROSE,
        "texts/test/deep.py": CODE,
        "NOTES": PROSE,
    }
    config.extensions = ["py"]
    assert [d.source for d in load_corpus(config).documents()] == ["NOTES", "texts/test/deep.py"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent", None, "absent does not exist"),
        ("empty.txt", b"", "empty.txt is empty"),
        ("latin.txt", b"caf\xe9 au lait", r"latin.txt is not UTF-8 text \(byte 3\)"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(load_corpus(DataConfig(corpus=str(tmp_path / name))).documents())


def test_a_folder_without_text_is_named_with_the_endings_that_were_looked_for(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"1")
    with pytest.raises(DataError, match=r"has no text in files named \.md, \.txt"):
        load_corpus(DataConfig(corpus=str(tmp_path), extensions=[".txt", ".md"]))


def test_a_bounded_corpus_stays_within_its_bound(tmp_path):
    folder = texts(tmp_path, 10)
    corpus = load_corpus(DataConfig(corpus=str(folder), max_bytes=5000))
    assert 0 < corpus.num_bytes <= 5000 and len(corpus) < 10
    with pytest.raises(DataError, match="no file of the corpus fits data.max_bytes of 10 bytes"):
        load_corpus(DataConfig(corpus=str(folder), max_bytes=10))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    documents = [Document(source="m", kind=CODE, text=MODULE * 20)]
    return train_tokenizer(documents, 400)


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_any_text_survives_encoding_and_decoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_document_that_spells_the_end_marker_does_not_end(tokenizer):
    ids = tokenizer.encode(f"a {END_OF_TEXT} b")
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode([*ids, tokenizer.end_of_text]) == f"a {END_OF_TEXT} b"


def test_the_vocabulary_does_not_depend_on_order_and_has_the_size_asked_for():
    documents = list(load_corpus(DataConfig(max_bytes="400KB")).documents())
    forward = train_tokenizer(documents, 1000)
    backward = train_tokenizer(documents[::-1], 1000)
    assert forward._inner.to_str() == backward._inner.to_str()
    assert forward.vocab_size == 1000


def test_a_small_corpus_gives_a_vocabulary_smaller_than_asked_for():
    tokenizer = train_tokenizer([Document(source="a", kind=PROSE, text="aaaa")], 500)
    assert 257 <= tokenizer.vocab_size < 270


def test_tokens_decode_to_the_documents_each_with_an_end_marker(data):
    tokens = load_tokens(data)
    decoded = set()
    for side in (tokens.train, tokens.evaluation):
        for start, end, kind in zip(side.starts, side.ends, side.kinds, strict=True):
            assert tokens.train.tokens[end - 1] == tokens.tokenizer.end_of_text
            assert KINDS[kind] == PROSE
            decoded.add(tokens.tokenizer.decode(side.tokens[start:end]))
    assert decoded == {document.text for document in load_corpus(data).documents()}
    assert tokens.train.tokens.dtype == np.uint16
    assert tokens.corpus_hash == load_corpus(data).hash


def test_both_sides_have_documents_and_none_is_on_both(data):
    tokens = load_tokens(data)
    sides = [set(side.starts.tolist()) for side in (tokens.train, tokens.evaluation)]
    assert all(sides) and not sides[0] & sides[1] and len(sides[0] | sides[1]) == 40
    assert 2 <= len(tokens.evaluation) <= 16


def test_code_and_prose_of_one_file_are_on_the_same_side(tmp_path):
    config = DataConfig(max_bytes="600KB", vocab_size=300, cache_dir=str(tmp_path))
    tokens = load_tokens(config)
    documents = list(load_corpus(config).documents())
    side_of = {}
    for side in ("train", "evaluation"):
        chosen = getattr(tokens, side)
        for start, end in zip(chosen.starts, chosen.ends, strict=True):
            text = tokens.tokenizer.decode(chosen.tokens[start:end])
            side_of[text] = side
    by_source: dict[str, set[str]] = {}
    for document in documents:
        by_source.setdefault(document.source, set()).add(side_of[document.text])
    assert all(len(sides) == 1 for sides in by_source.values())


def test_of_a_single_text_the_end_is_held_back(tmp_path):
    (tmp_path / "book.txt").write_text("It was a page like any other. " * 200)
    config = DataConfig(
        corpus=str(tmp_path / "book.txt"),
        vocab_size=300,
        eval_fraction=0.1,
        cache_dir=str(tmp_path / "cache"),
    )
    tokens = load_tokens(config)
    total = tokens.train.num_tokens + tokens.evaluation.num_tokens
    assert tokens.evaluation.num_tokens == int(total * 0.1)
    assert tokens.train.ends.tolist() == tokens.evaluation.starts.tolist()


def test_tokens_are_made_once_and_made_again_where_the_cache_is_damaged(data, monkeypatch):
    first = load_tokens(data)
    (folder,) = Path(data.cache_dir).iterdir()
    with monkeypatch.context() as patched:
        patched.setattr("odc.train.tokens.train_tokenizer", None)
        again = load_tokens(data)
    assert np.array_equal(first.train.tokens, again.train.tokens)
    for name in ("tokens.npy", "documents.npy", "tokenizer.json"):
        whole = (folder / name).read_bytes()
        # A new file: the old one is mapped by `first`.
        (folder / name).unlink()
        (folder / name).write_bytes(whole[: len(whole) // 2])
        assert np.array_equal(load_tokens(data).train.tokens, first.train.tokens), name
        assert (folder / name).read_bytes() == whole
    assert [path.name for path in Path(data.cache_dir).iterdir()] == [folder.name]


def test_other_text_or_another_vocabulary_gets_tokens_of_its_own(data):
    load_tokens(data)
    data.vocab_size = 320
    load_tokens(data)
    (Path(data.corpus[0]) / "text00.txt").write_text("Quite another text. " * 30)
    load_tokens(data)
    assert len(list(Path(data.cache_dir).iterdir())) == 3


def test_the_cache_folder_is_the_first_that_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("ODC_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir(DataConfig()) == Path("/home/me/.cache/odc")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir(DataConfig()) == Path("/x/odc")
    monkeypatch.setenv("ODC_CACHE_DIR", "/o")
    assert cache_dir(DataConfig()) == Path("/o")
    assert cache_dir(DataConfig(cache_dir="/c")) == Path("/c")


def test_a_cache_that_cannot_be_written_is_named(data, tmp_path):
    (tmp_path / "file").write_text("in the way")
    data.cache_dir = str(tmp_path / "file" / "cache")
    with pytest.raises(DataError, match="file/cache cannot be written"):
        load_tokens(data)


def test_runs_that_start_together_share_one_cache(data):
    code = (
        "import sys; from odc.train.config_model import DataConfig;"
        "from odc.train.tokens import load_tokens;"
        "d = DataConfig(corpus=sys.argv[1], vocab_size=300, cache_dir=sys.argv[2]);"
        "print(load_tokens(d).train.tokens.sum())"
    )
    command = [sys.executable, "-c", code, data.corpus[0], data.cache_dir]
    environment = {**os.environ, "RAYON_NUM_THREADS": "1"}
    runs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
        for _ in range(2)
    ]
    sums = {run.communicate(timeout=60)[0] for run in runs}
    assert all(run.returncode == 0 for run in runs) and len(sums) == 1
    assert len(list(Path(data.cache_dir).iterdir())) == 1
