"""How fast this machine computes, updates and moves: measured, told on the command line, or both.

Compute of the own Transformer is measured with its own layers at the micro-batch in question (that
alone tells what a CPU loses outside of matrix products). Other models are timed by their floating
point operations over a rate: the one that was told, or that of a few products of their sizes.
"""

import ctypes
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odc.fsdp.adamw import measure_update_rate
from odc.fsdp.lora import lora
from odc.memory.home import default_folder
from odc.memory.replay import Link
from odc.train.config_model import ModelConfig
from odc.train.fit.choice import Choice
from odc.train.fit.model import ModelShape, Role, Unit, attention_flops
from odc.train.fit.work import Times
from odc.train.links import Links, load_links, measure_links, remember

# Moving the state of one parameter through AdamW: it reads four numbers and writes three.
_UPDATE_BYTES = 28
_CARD_BYTES_S = 600e9  # of a card's memory, where a card was told: a cautious figure
_CARD_HOOK_NS = 60_000.0
_MOST_BYTES = 384 << 20  # of layers that are built to be measured
_COLD_BYTES = 64 << 20  # of layers that are measured in turn, so that caches do not hold them
_REPEATS = 5
_HOOK_WIDTH, _HOOK_LAYERS = 160, 12
_COPY_BYTES = 64 << 20


@dataclass(frozen=True)
class Rates:
    """What is fast and what is not, and who said so.

    Attributes:
        flops: Floating-point operations a second in matrix products; `None`: layers are measured.
        update_s: Seconds of the optimizer for each parameter, on the device.
        home_update_s: The same at home.
        host, disk: Links to the two tiers.
        hook_ns: Of the runtime at an access.
        crowding: What a computation takes beside a busy copy, over what it takes alone.
        sources: Where each figure comes from, for people.
    """

    flops: float | None
    update_s: float
    home_update_s: float
    host: Link
    disk: Link
    hook_ns: float = _CARD_HOOK_NS
    crowding: float = 1.0
    sources: dict[str, str] = field(default_factory=dict)

    def link(self, home: str) -> Link:
        """The way to a home of one tier."""
        return self.disk if home == "disk" else self.host


@dataclass(frozen=True)
class Told:
    """What the command line says; `None`: measured. Bytes and operations a second.

    Attributes:
        card: Another machine is meant, whose device has memory of its own.
    """

    flops: float | None = None
    link: float | None = None
    disk_rate: float | None = None
    folder: str | None = None
    card: bool = False


def find_rates(told: Told, say: Callable[[str], None], threads: int = 1) -> Rates:
    """Takes what was told, and finds the rest out on this machine.

    Args:
        told: From the command line.
        say: Told what takes long.
        threads: That compute.

    Raises:
        ConfigError: A folder cannot be written.
    """
    sources: dict[str, str] = {}
    links = None
    if told.link is None or told.disk_rate is None:
        links, how = _links(told.folder, say)
        given = {"link": told.link, "disk": told.disk_rate}
        sources = {name: how for name, rate in given.items() if rate is None}
    host = _link(told.link, None if links is None else links.link("host"))
    disk = _link(told.disk_rate, None if links is None else links.link("disk"))
    for name, rate in (("link", told.link), ("disk", told.disk_rate), ("compute", told.flops)):
        if rate is not None:
            sources[name] = "told"
    say("the optimizer")
    measured = update_seconds(threads)
    update = _UPDATE_BYTES / _CARD_BYTES_S if told.card else measured
    sources.setdefault("compute", "measured now with the layers of this shape")
    sources["update"] = (
        f"{_UPDATE_BYTES} bytes a parameter at {_CARD_BYTES_S / 1e9:.0f} GB/s (assumed)"
        if told.card
        else "measured now"
    )
    hook, crowding = _CARD_HOOK_NS, 1.0
    if not told.card:
        say("the runtime's own time, and computing beside a copy")
        hook, crowding = hook_ns(threads), crowding_of(threads)
    return Rates(
        flops=told.flops,
        update_s=update,
        hook_ns=hook,
        crowding=crowding,
        home_update_s=measured,
        host=host,
        disk=disk,
        sources=sources,
    )


def _link(told: float | None, measured: Link | None) -> Link:
    if told is not None:
        return Link(told, told, latency_ns=20_000, frame_move_ns=5_000)
    assert measured is not None, "what is not told is measured"
    return measured


def _links(folder: str | None, say: Callable[[str], None]) -> tuple[Links, str]:
    known = load_links(folder)
    if known is not None:
        return known, f"measured {known.measured} (odc doctor --measure-links)"
    found = measure_links(default_folder(folder), say)
    remember(found)
    return found, "measured now"


def update_seconds(threads: int) -> float:
    """Seconds of a fused AdamW for each parameter, state larger than caches."""
    with _threads(threads):
        return 4.0 / measure_update_rate()


def hook_ns(threads: int) -> float:
    """What an access costs beside its transfer: a small model paged and plain, hooks included."""
    from odc.fsdp.paged import paged

    def steps(model: Any, optimizer: Any, count: int) -> float:
        x = torch.ones(4, _HOOK_WIDTH)
        start = time.perf_counter_ns()
        for _ in range(count):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter_ns() - start) / count

    with _threads(threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = _Stack()
        adamw = torch.optim.AdamW(plain.parameters(), fused=True)
        steps(plain, adamw, 3)
        alone = statistics.median(steps(plain, adamw, 1) for _ in range(9))
        made: Any
        made, optimizer = paged(
            _Stack(), torch.optim.AdamW, page_budget=2 * _HOOK_LAYERS << 20, update="backward"
        )
        steps(made, optimizer, 10)
        took, accesses = [], 0
        for _ in range(15):
            made.memory.take()
            whole = steps(made, optimizer, 1)
            counters = made.memory.take()
            took.append(whole - counters.stall_ns)
            accesses = counters.accesses
        made.close()
    return max(statistics.median(took) - alone, 0.0) / max(accesses, 1)


class _Stack(nn.Module):
    """Layers so small that they compute next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(_HOOK_WIDTH, _HOOK_WIDTH) for _ in range(_HOOK_LAYERS))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, D) to (N, D)."""
        for layer in self.layers:
            x = layer(x)
        return x


def crowding_of(threads: int) -> float:
    """A matrix product beside a thread that copies memory, over the same alone; at least 1."""
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    stop = threading.Event()

    def copy() -> None:
        while not stop.is_set():
            ctypes.memmove(target.ctypes.data, source.ctypes.data, _COPY_BYTES)

    with _threads(threads):
        x, weight = torch.ones(256, 1024), torch.ones(4096, 1024)
        products = 24

        def run() -> None:
            for _ in range(products):
                F.linear(x, weight)

        alone = _seconds(run)
        thread = threading.Thread(target=copy, daemon=True)
        thread.start()
        beside = _seconds(run)
        stop.set()
        thread.join()
    return max(beside / alone, 1.0)


def measured_flops(model: ModelShape, choice: Choice, threads: int) -> float:
    """Operations a second of a layer's largest product at this micro-batch."""
    layer = max(
        (u for u in model.units if u.role in (Role.LAYER, Role.EXPERT)), key=lambda u: u.numel
    )
    shape = max((s for s in layer.parameters.values() if len(s) == 2), key=lambda s: s[0] * s[1])
    rows, columns = (min(size, 4096) for size in shape)
    tokens = max(min(choice.tokens, 1024), 1)
    dtype = torch.bfloat16 if choice.dtype == "bfloat16" else torch.float32
    with _threads(threads):
        weight, x = torch.ones(rows, columns, dtype=dtype), torch.ones(tokens, columns, dtype=dtype)
        took = _seconds(lambda: F.linear(x, weight))
    return 2.0 * rows * columns * tokens / took


# -- times -----------------------------------------------------------------------------------------


def times_of(model: ModelShape, choice: Choice, rates: Rates, threads: int = 1) -> Times:
    """What a step of a choice computes: measured where that can be, else from operations."""
    small = model.config is not None and 4 * model.largest.numel < _MOST_BYTES
    if rates.flops is None and small and choice.dtype == "float32":
        made = measured_times(model, choice, threads)
    else:
        flops = rates.flops or measured_flops(model, choice, threads)
        made = times_from_flops(model, choice, flops)
    return replace(made, update=rates.update_s * 1e9, hook=rates.hook_ns)


def times_from_flops(model: ModelShape, choice: Choice, flops: float) -> Times:
    """Forward by operations over a rate; backward twice that, once where weights are frozen."""
    tokens = choice.tokens
    attention = attention_flops(model, choice.seq_len)

    def forward(unit: Unit, share: float = 1.0) -> float:
        return 2.0 * unit.matmul_numel * tokens * share / flops * 1e9

    layer = forward(model.of(Role.LAYER)[0]) + attention * tokens / flops * 1e9
    found = {Role.ROOT: 0.0, Role.EMBEDDING: 0.0, Role.LAYER: layer}
    found[Role.HEAD] = 2.0 * model.vocab * model.hidden * tokens / flops * 1e9
    experts = model.of(Role.EXPERT)
    used = model.used_experts(tokens)
    found[Role.EXPERT] = 0.0
    if experts:
        whole = sum(forward(u) for u in experts if u.layer == experts[0].layer)
        found[Role.EXPERT] = whole * _true_share(model) / max(used, 1.0)
    times = 1.0 if choice.rank is not None else 2.0
    backward = {role: times * ns for role, ns in found.items()}
    return Times(forward=found, backward=backward, update=0.0)


def _true_share(model: ModelShape) -> float:
    """Share of a layer's experts' parameters that work on a token, however they are bundled."""
    experts = [u for u in model.of(Role.EXPERT) if u.layer == 0]
    return model.top_k / sum(u.count for u in experts)


def measured_times(model: ModelShape, choice: Choice, threads: int) -> Times:
    """Times the own Transformer's parts at this micro-batch, on this machine."""
    assert model.config is not None, "only the own Transformer is built to be measured"
    with _threads(threads):
        bench = _Bench(model, choice)
        layer = bench.layers()
        head, embedding = bench.head(), bench.embedding()
        expert = bench.expert() if model.num_experts else (0.0, 0.0)
        copy = bench.copy_s()
    if model.num_experts:
        layer = tuple(  # type: ignore[assignment]
            max(whole - bench.used * each, 0.1 * whole)
            for whole, each in zip(layer, expert, strict=True)
        )
    roles = {
        Role.ROOT: (0.0, 0.0),
        Role.EMBEDDING: embedding,
        Role.LAYER: layer,
        Role.EXPERT: expert,
        Role.HEAD: head,
    }
    return Times(
        forward={role: pair[0] * 1e9 for role, pair in roles.items()},
        backward={role: pair[1] * 1e9 for role, pair in roles.items()},
        update=0.0,
        copy=copy * 1e9,
    )


class _Bench:
    """Layers of a shape, and a batch."""

    def __init__(self, model: ModelShape, choice: Choice) -> None:
        from odc.train.models import build_model, rope_tables

        assert model.config is not None
        layer_bytes = 4 * sum(u.numel for u in model.units if u.layer == 0)
        self.count = max(1, min(model.num_layers, _COLD_BYTES // layer_bytes + 1))
        values = {name: getattr(model.config, name) for name in ModelConfig.fields()}
        config = ModelConfig(**values | {"num_layers": self.count})
        self.model = build_model(config, model.vocab)
        if choice.rank is not None:
            only = choice.targets[0] if len(choice.targets) == 1 else choice.targets
            lora(self.model, choice.rank, targets=only)
        self.shape = (choice.micro_batch, choice.seq_len, model.hidden)
        self.ids = torch.randint(0, model.vocab, self.shape[:2])
        self.rope = rope_tables(0, choice.seq_len, config, torch.device("cpu"))
        self.used = model.used_experts(choice.tokens)
        self.rows = max(round(choice.tokens * model.top_k / max(self.used, 1.0)), 1)
        self.hidden = model.hidden

    def layers(self) -> tuple[float, float]:
        """(forward, backward) s of a layer."""

        def run() -> Tensor:
            x = self._input()
            for layer in self.model.layers:
                x, auxiliary = layer(x, self.rope)
            return x.sum() + auxiliary

        forward, backward = self._time(run)
        return forward / self.count, backward / self.count

    def head(self) -> tuple[float, float]:
        """(forward, backward) s of the last norm, the head and the loss."""
        targets = self.ids.flatten()

        def run() -> Tensor:
            logits = self.model.head(self.model.norm(self._input()))
            return F.cross_entropy(logits.flatten(0, 1).float(), targets)

        return self._time(run)

    def embedding(self) -> tuple[float, float]:
        """(forward, backward) s of the embedding."""
        if not self.model.embed.weight.requires_grad:
            with torch.no_grad():
                return _seconds(lambda: self.model.embed(self.ids)), 0.0
        return self._time(lambda: self.model.embed(self.ids).sum())

    def expert(self) -> tuple[float, float]:
        """(forward, backward) s of one expert on its share of the tokens."""
        experts = self.model.layers[0].mlp.experts  # type: ignore[union-attr]

        def run() -> Tensor:
            total = torch.zeros(())
            for expert in experts:  # type: ignore[union-attr]
                x = torch.randn(self.rows, self.hidden, requires_grad=True)
                total = total + expert(x).sum()
            return total

        forward, backward = self._time(run)
        count = len(experts)  # type: ignore[arg-type]
        return forward / count, backward / count

    def copy_s(self) -> float:
        """Seconds of a gradient's way into its page, for each parameter."""
        numel = 4 << 20
        page, gradient = torch.zeros(numel), torch.ones(numel)
        return _seconds(lambda: page.copy_(gradient)) / numel

    def _input(self) -> Tensor:
        return torch.randn(self.shape, requires_grad=True)

    def _time(self, run: Callable[[], Tensor]) -> tuple[float, float]:
        """Medians of forward and backward."""
        forwards, backwards = [], []
        for _ in range(_REPEATS):
            for parameter in self.model.parameters():
                parameter.grad = None
            start = time.perf_counter()
            value = run()
            middle = time.perf_counter()
            value.backward()
            end = time.perf_counter()
            forwards.append(middle - start)
            backwards.append(end - middle)
        return statistics.median(forwards[1:]), statistics.median(backwards[1:])


def _seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
