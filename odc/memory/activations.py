"""The account of activations: what autograd keeps for backward, by layer, and what would keep less.

A *storage* is counted once, however many tensors over it were saved. A pass is recorded as sets of
storages: for every call of a layer those that it was given and those that were saved in it, and
what was saved between the calls. Those sets say what another mode would have kept at its peak:

* keep: all of it, at the end of the forward;
* checkpoint: what the calls were given and what was saved outside them; in backward the storages
  of one call come back at a time;
* offload: what was saved outside the calls, and the storages of two calls that follow each other
  (one that computes, one whose storages are on their way).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from odc.sizes import format_bytes

MODES = ("keep", "checkpoint", "offload")
_SHOWN = 4  # layers that an error names
OFFLOAD_BYTES = 16 * 1024  # storages below it stay: their command costs more than their memory


@dataclass(slots=True)
class CallProfile:
    """One call of a layer: its name, and the storages that it was given and that it saved."""

    name: str
    inputs: set[int] = field(default_factory=set)
    saved: set[int] = field(default_factory=set)


@dataclass(slots=True)
class ActivationProfile:
    """What one forward saved for its backward, measured.

    Attributes:
        tokens: size of the pass's first input.
        sizes: bytes of every storage; sets hold indices into it.
        calls: calls of layers, in order.
        outside: what was saved before the first call, between calls, and behind the last one.
    """

    tokens: int
    sizes: list[int] = field(default_factory=list)
    calls: list[CallProfile] = field(default_factory=list)
    outside: list[set[int]] = field(default_factory=lambda: [set()])

    def bytes_of(self, storages: Iterable[int]) -> int:
        """Bytes of a set of storages."""
        return sum(self.sizes[index] for index in storages)

    @property
    def loss_storage(self) -> int | None:
        """The largest storage behind the last layer, if it is larger than what that was given.

        That is what grows with the vocabulary: the logits, as cross-entropy keeps them.
        """
        given = self.calls[-1].inputs if self.calls else set()
        largest = max(self.outside[-1], key=lambda i: self.sizes[i], default=None)
        if largest is None or self.sizes[largest] <= max((self.sizes[i] for i in given), default=0):
            return None
        return largest

    @property
    def loss_bytes(self) -> int:
        """Bytes that a chunked loss would not keep."""
        return 0 if self.loss_storage is None else self.sizes[self.loss_storage]

    @property
    def boundary_bytes(self) -> int:
        """Bytes of all that layers were given."""
        return self.bytes_of(set().union(*(call.inputs for call in self.calls)))

    def by_layer(self) -> dict[str, int]:
        """Bytes that the calls of each layer saved, without what they were given."""
        found: dict[str, int] = {}
        for call in self.calls:
            own = self.bytes_of(call.saved - call.inputs)
            found[call.name] = found.get(call.name, 0) + own
        return found

    @property
    def outside_bytes(self) -> int:
        """Bytes saved outside the calls of layers and by none of them, the loss's among them."""
        inside = set().union(*(call.saved | call.inputs for call in self.calls))
        return self.bytes_of(set().union(*self.outside) - inside)


def predict_peak(profile: ActivationProfile, mode: str, chunked_loss: bool = False) -> int:
    """Bytes that a pass would keep at its peak.

    Args:
        profile: of a measured pass (in mode ``checkpoint`` complete once its backward has run).
        mode: one of ``MODES``.
        chunked_loss: the loss keeps no logits (``activations.loss_chunk``).

    Raises:
        ValueError: ``mode`` is none of them.
    """
    outside = [set(storages) for storages in profile.outside]
    if chunked_loss and profile.loss_storage is not None:
        outside[-1].discard(profile.loss_storage)
    if mode == "keep":
        return profile.bytes_of(set().union(*outside, *(call.saved for call in profile.calls)))
    if mode == "checkpoint":
        return max(map(profile.bytes_of, _checkpointed(profile, outside)))
    if mode == "offload":
        return max(map(profile.bytes_of, _offloaded(profile, outside)))
    raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")


def _checkpointed(profile: ActivationProfile, outside: list[set[int]]) -> Iterable[set[int]]:
    """What is kept at the end of the forward, and during the backward of each call."""
    kept: set[int] = set()
    for before, call in zip(outside, profile.calls, strict=False):
        kept |= before | call.inputs
        yield kept | call.saved
    yield kept | outside[-1]


def _offloaded(profile: ActivationProfile, outside: list[set[int]]) -> Iterable[set[int]]:
    """What is kept while each call runs, forward or backward, and at the end of the forward."""
    kept: set[int] = set()
    last: set[int] = set()
    small = {index for index, size in enumerate(profile.sizes) if size < OFFLOAD_BYTES}
    moving: set[int] = set()
    for before, call in zip(outside, profile.calls, strict=False):
        kept |= before | (last & small)
        moving = last | call.saved
        last = call.saved
        yield kept | moving
    yield kept | moving | outside[-1]


@dataclass(slots=True)
class ActivationAccount:
    """Activations in the ledger. Bytes are of distinct storages that are no pages.

    Attributes:
        mode: what is done with them.
        live_bytes: kept now, as far as the passes that made them were measured.
        peak_bytes: the most that was kept in the last measured pass and its backward.
        max_peak_bytes: the same over all measured passes.
        profile: the largest measured pass; None before there was one.
        home_bytes: host memory that moved storages take.
        bytes_in, bytes_out: moved since the last look, apart from the traffic of pages.
    """

    mode: str = "keep"
    live_bytes: int = 0
    peak_bytes: int = 0
    max_peak_bytes: int = 0
    profile: ActivationProfile | None = None
    home_bytes: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    def add(self, num_bytes: int) -> None:
        """A storage was saved."""
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.max_peak_bytes = max(self.max_peak_bytes, self.peak_bytes)

    def begin(self) -> None:
        """A pass begins that is measured; its peak counts anew, unless others are still alive."""
        self.peak_bytes = self.live_bytes

    def savings(self) -> dict[str, int]:
        """Bytes by which the peak would fall: for each other mode, and ``loss_chunk``."""
        profile = self.profile
        if profile is None:
            return {}
        now = predict_peak(profile, self.mode)
        found = {mode: now - predict_peak(profile, mode) for mode in MODES[1:]}
        found["loss_chunk"] = now - predict_peak(profile, self.mode, chunked_loss=True)
        return {name: saved for name, saved in found.items() if saved > 0}

    def take_traffic(self) -> tuple[int, int]:
        """Bytes (in, out) since the last call."""
        moved = self.bytes_in, self.bytes_out
        self.bytes_in = self.bytes_out = 0
        return moved


def describe_owners(account: ActivationAccount, rest_bytes: int) -> str:
    """Whose the peak of everything but pages was, in words; empty if no pass was measured."""
    profile = account.profile
    if profile is None:
        return ""
    layers = sorted(profile.by_layer().items(), key=lambda item: -item[1])
    shown = [f"{name} {format_bytes(size)}" for name, size in layers[:_SHOWN]]
    if len(layers) > _SHOWN:
        shown.append(f"{len(layers) - _SHOWN} more layers")
    owners = [f"activations {format_bytes(account.max_peak_bytes)} ({', '.join(shown)})"]
    if not shown:
        owners = [f"activations {format_bytes(account.max_peak_bytes)}"]
    if profile.loss_bytes:
        owners.append(f"of these the logits {format_bytes(profile.loss_bytes)}")
    others = max(rest_bytes - account.max_peak_bytes, 0)
    owners.append(f"gradients on their way and other transients {format_bytes(others)}")
    return "; ".join(owners)


def describe_remedies(account: ActivationAccount, in_config: bool) -> list[str]:
    """What would make the peak of activations fall, and by how much; the most first.

    Args:
        account: of the run.
        in_config: name options as ``config.yaml`` has them, else as ``odc.paged`` does.
    """
    names = {
        "checkpoint": ("activations.mode=checkpoint", 'activations="checkpoint"'),
        "offload": ("activations.mode=offload", 'activations="offload"'),
        "loss_chunk": ("activations.loss_chunk=1024", "odc.chunked_cross_entropy"),
    }
    found = sorted(account.savings().items(), key=lambda item: -item[1])
    return [f"{names[key][not in_config]} saves about {format_bytes(b)}" for key, b in found]
