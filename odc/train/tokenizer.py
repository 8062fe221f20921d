"""A byte-level BPE tokenizer trained on the corpus itself.

Bytes are the base alphabet, so any text is encoded and decoded without loss, whatever the
vocabulary was trained on. Merges are learned from a bounded sample of the documents, which keeps
training in seconds and changes the merges of a vocabulary this small very little.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from odc.errors import DataError
from odc.train.corpus import Document

END_OF_TEXT = "<|endoftext|>"
SAMPLE_CHARS = 4_000_000


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, inner: tokenizers.Tokenizer, end_of_text: str = END_OF_TEXT) -> None:
        self._inner = inner
        # A document that spells the marker out means the characters, not the end of a text.
        self._inner.encode_special_tokens = True
        marker = inner.token_to_id(end_of_text)
        if marker is None:
            raise DataError(f"the tokenizer has no {end_of_text} token; delete it to train anew")
        self.end_of_text: int = marker

    @property
    def vocab_size(self) -> int:
        """Number of token ids; less than asked for where the corpus is too small for more."""
        return self._inner.get_vocab_size()

    @property
    def hash(self) -> str:
        """SHA-256 of its file."""
        return hashlib.sha256(self._inner.to_str().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, without an end marker."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text, without end markers."""
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids; end markers are left out."""
        return self._inner.decode(list(ids), skip_special_tokens=True)

    def save(self, path: Path) -> None:
        """Writes the tokenizer as one JSON file."""
        path.write_text(self._inner.to_str(), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Reads what `save` wrote."""
        return cls(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))


def train_tokenizer(documents: Sequence[Document], vocab_size: int) -> Tokenizer:
    """Learns a vocabulary; the same documents give the same one, in whatever order they come.

    Args:
        documents: Texts to sample from.
        vocab_size: Number of token ids wanted, the 256 bytes and the end marker included.
    """
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(_sample(documents), trainer=trainer)
    return Tokenizer(inner)


def _sample(documents: Sequence[Document]) -> list[str]:
    """Takes documents in the order of their hashes until there are `SAMPLE_CHARS`."""

    def key(document: Document) -> bytes:
        return hashlib.sha256(f"{document.kind}:{document.source}".encode()).digest()

    chosen: list[str] = []
    left = SAMPLE_CHARS
    for document in sorted(documents, key=key):
        if left <= 0:
            break
        chosen.append(document.text[:left])
        left -= len(chosen[-1])
    return chosen
