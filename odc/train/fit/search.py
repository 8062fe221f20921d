"""The best settings: a small search over modes, places and orders, judged by the simulator.

Every candidate gets its accounts and a rough time (bytes over rates against compute); the few
that look fastest are simulated. More micro-batches a step always hide more transfers, and change
what is trained: of choices within a few per cent the one with fewer tokens a step is taken.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from odc.memory.events import Kind
from odc.memory.frames import FRAME_BYTES
from odc.train.fit.accounts import Accounts, Target, account, has_room, offloaded_bytes
from odc.train.fit.choice import Choice
from odc.train.fit.groups import Paged, page
from odc.train.fit.model import ModelShape, Role
from odc.train.fit.predict import Prediction, link_of, predict
from odc.train.fit.rates import Rates, times_of
from odc.train.fit.work import Times

MOST_SEQUENCES = 1 << 12  # of a micro-batch: nobody asks for more
STEP_TOKENS = 1 << 17  # of an optimizer step at most, unless the user says more
_MODES = ("keep", "checkpoint", "offload")
_ORDERS = ("micro_major", "layer_major")
_MICRO = (1, 2, 4, 8, 16, 32, 64)
_ACCUMULATE = (1, 2, 4, 8, 16, 32, 64)
_SIMULATED = 2
_FEW_COUNTS = (1, 2, 4, 16, 64)  # micro-batches that are tried of models known by shapes
_CLOSE = 1.05
_LOSS_CHUNK = 1024
_BUNDLES = 2  # of experts that a simulated layer keeps apart


@dataclass(frozen=True)
class Fixed:
    """What the user has decided; `None` leaves it to the search."""

    seq_len: int
    dtype: str
    rank: int | None
    micro_batch: int | None = None
    accumulate: int | None = None
    total_mem: int | None = None


@dataclass
class Candidate:
    """A choice on a machine.

    Attributes:
        paged: Groups of pages and the choice; experts in bundles where a layer has many.
        target: The machine.
        rates, times: What moving and computing take.
    """

    paged: Paged
    target: Target
    rates: Rates
    times: Times

    @property
    def choice(self) -> Choice:
        return self.paged.choice

    @cached_property
    def accounts(self) -> Accounts:
        return account(self.paged, self.target)

    @cached_property
    def rough_s(self) -> float:
        """Seconds of a step by bytes over rates, against compute and updates at home."""
        link = link_of(self.paged, self.rates, self.accounts)
        trained = self.paged.trained_numel * self.choice.item_bytes
        return max(_compute_s(self), trained / link.update_rate, *_transfer_s(self))

    @cached_property
    def prediction(self) -> Prediction:
        """By the simulator."""
        rehearse = self.paged.model.config is not None
        return predict(self.paged, self.times, self.rates, self.accounts, rehearse=rehearse)

    @property
    def rough_tokens_s(self) -> float:
        """Tokens a second by the rough time."""
        return self.choice.step_tokens / self.rough_s


class Search:
    """Candidates of a model on a machine.

    Args:
        model: Its experts are bundled for the search where a layer has many.
        fixed: What the user has decided.
        target, rates: The machine.
        threads: That compute, where compute is measured.
    """

    def __init__(
        self, model: ModelShape, fixed: Fixed, target: Target, rates: Rates, threads: int = 1
    ) -> None:
        self.whole = model
        self.model = model if model.config is not None else model.bundled(_BUNDLES)
        self.fixed, self.target, self.rates = fixed, target, rates
        self._threads = threads
        self._times: dict[tuple[object, ...], Times] = {}
        self._paged: dict[tuple[object, ...], Paged] = {}
        self._predictions: dict[Choice, Prediction] = {}

    def candidate(self, choice: Choice) -> Candidate:
        """A choice with what it needs to be judged."""
        return Candidate(self._page(choice), self.target, self.rates, self._time(choice))

    def exact_accounts(self, choice: Choice) -> Accounts:
        """The accounts of a choice, every expert by itself."""
        return account(page(self.whole, choice), self.target)

    def predict(self, choice: Choice, accounts: Accounts) -> Prediction:
        """Simulates a choice; pages get what the exact accounts give them."""
        made = self.candidate(choice)
        pages = min(accounts.pages, made.paged.all_bytes)
        if pages == made.accounts.pages and choice in self._predictions:
            return self._predictions[choice]
        rehearse = self.model.config is not None
        given = replace(made.accounts, pages=pages)
        return predict(made.paged, made.times, self.rates, given, rehearse=rehearse)

    def _page(self, choice: Choice) -> Paged:
        key = (
            *(choice.dtype, choice.rank, choice.where, choice.targets),
            *(choice.page_size, choice.frozen_format, choice.rank and choice.home == "host"),
        )
        if key not in self._paged:
            self._paged[key] = page(self.model, choice)
        return replace(self._paged[key], choice=choice)

    def _time(self, choice: Choice) -> Times:
        key = (choice.tokens, choice.seq_len, choice.dtype, choice.rank, choice.where)
        if key not in self._times:
            self._times[key] = times_of(self.model, choice, self.rates, self._threads)
        return self._times[key]

    def resident(self) -> Candidate | None:
        """Everything on the device, where that fits at one sequence."""
        micro = self.fixed.micro_batch or 1
        dtype = "float32" if self.fixed.rank is None else self.fixed.dtype
        for mode in _MODES:
            choice = replace(self._base(micro), mode=mode, total_mem=None, dtype=dtype)
            if self.fixed.total_mem is not None:
                continue
            made = self.candidate(choice)
            whole = made.paged.all_bytes + made.accounts.rest.total
            if whole <= self.target.usable:
                return made
        return None

    def best(self) -> Candidate | None:
        """The fastest that fits, fewer tokens a step among equals; `None`: nothing fits."""
        fitting = [c for c in self.candidates() if c.accounts.fits]
        if not fitting:
            return None
        fitting.sort(key=lambda c: -c.rough_tokens_s)
        top = fitting[0].rough_tokens_s
        close = [c for c in fitting if c.rough_tokens_s * _CLOSE >= top]
        close.sort(key=lambda c: (c.choice.step_tokens, c.choice.accumulate, -c.rough_tokens_s))
        if self.whole.config is None:  # a simulation takes seconds: bytes over rates decide
            return close[0]
        tried = _distinct([*close[:_SIMULATED], fitting[0]])
        best = max(tried, key=lambda c: c.prediction.tokens_s)
        self._predictions = {c.choice: c.prediction for c in tried}
        near = [c for c in tried if c.prediction.tokens_s * _CLOSE >= best.prediction.tokens_s]
        return min(near, key=lambda c: c.choice.step_tokens)

    def candidates(self) -> Iterator[Candidate]:
        """All combinations worth a look."""
        for mode, (where, update), order, packed in itertools.product(
            _MODES, self._places(), _ORDERS, self._formats()
        ):
            for micro, count in self._batches(order):
                yield from self._homed(
                    replace(
                        self._base(micro),
                        accumulate=count,
                        mode=mode,
                        where=where,
                        update=update,
                        order=order,
                        frozen_format=packed,
                    )
                )

    def largest_micro_batch(self, choice: Choice) -> int:
        """The most sequences of a micro-batch under otherwise equal settings; 0: not even one."""

        def fits(micro: int) -> bool:
            made = replace(choice, micro_batch=micro)
            return account(self._page(made), self.target).fits

        if not fits(1):
            return 0
        low, high = 1, 2
        while high <= MOST_SEQUENCES and fits(high):
            low, high = high, 2 * high
        if high > MOST_SEQUENCES:
            return low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    # -- what there is to choose from ------------------------------------------------------------

    def _base(self, micro: int) -> Choice:
        fixed = self.fixed
        total = self.target.usable if fixed.total_mem is None else fixed.total_mem
        loss = micro * fixed.seq_len * self.model.vocab * 12
        chunk = _LOSS_CHUNK if loss > total // 10 else None
        return Choice(
            seq_len=fixed.seq_len,
            micro_batch=micro,
            accumulate=fixed.accumulate or 1,
            dtype=fixed.dtype,
            rank=fixed.rank,
            total_mem=total,
            loss_chunk=chunk,
        )

    def _places(self) -> list[tuple[str, str]]:
        """Where updates run: only masters at home go with parameters of bfloat16."""
        at_home = [("home", "backward")]
        whole = self.fixed.dtype == "float32" or self.fixed.rank is not None
        return [("device", "backward"), *at_home] if whole else at_home

    def _formats(self) -> tuple[str, ...]:
        return ("native",) if self.fixed.rank is None else ("native", "int8", "int4")

    def _batches(self, order: str) -> Iterator[tuple[int, int]]:
        fixed = self.fixed
        most = max(STEP_TOKENS // fixed.seq_len, 1)
        counts = _ACCUMULATE if self.whole.config is not None else _FEW_COUNTS
        for micro in _MICRO if fixed.micro_batch is None else (fixed.micro_batch,):
            for count in counts if fixed.accumulate is None else (fixed.accumulate,):
                wasted = order == "layer_major" and count == 1
                if (micro * count <= most or micro * count == 1) and not wasted:
                    yield micro, count

    def _homed(self, choice: Choice) -> Iterator[Candidate]:
        """With the first home that has room: host, host and disk, disk."""
        made = None
        if not has_room(self._page(choice), self.target):
            return
        for home in ("host", "host+disk", "disk"):
            made = self.candidate(replace(choice, home=home))
            if made.accounts.fits:
                break
        if made is not None:
            yield made


def _distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    return list({id(c): c for c in candidates}.values())


def _compute_s(candidate: Candidate) -> float:
    """Compute of a step."""
    model, choice, times = candidate.paged.model, candidate.choice, candidate.times
    counts = {role: float(len(model.of(role))) for role in Role}
    counts[Role.EXPERT] = model.num_layers * model.used_experts(choice.tokens)
    counts[Role.HEAD] = 1.0
    total = 0.0
    for role, count in counts.items():
        again = choice.recomputes and role in (Role.LAYER, Role.EXPERT)
        total += count * (times.forward[role] * (2 if again else 1) + times.backward[role])
    update = times.update * candidate.paged.trained_numel if choice.where == "device" else 0.0
    return (total * choice.accumulate + update) / 1e9


def _transfer_s(candidate: Candidate) -> tuple[float, float]:
    """(s in, s out) of a step, what stays resident taken off."""
    paged, choice, accounts = candidate.paged, candidate.choice, candidate.accounts
    sizes = {kind: 0 for kind in Kind}
    on_disk = packed = 0
    for one in paged.table.pages:
        size = one.num_frames * FRAME_BYTES
        sizes[one.kind] += size
        packed += round(size * one.home_share) if one.kind == Kind.PARAMETER else 0
        on_disk += 0 if accounts.on_host[one.page] else size
    parameters, moments = sizes[Kind.PARAMETER], sizes[Kind.MOMENT]
    stays = max(accounts.pages - accounts.least_pages, 0)
    turns = choice.accumulate if choice.order == "micro_major" else 1
    # Gradients that outlive their pass share the frames with parameters.
    gradients = sizes[Kind.GRADIENT] if turns > 1 else 0
    gone = max(1.0 - stays / max(parameters + gradients, 1), 0.0)
    inside = 2 * turns * packed * gone + (turns - 1) * gradients * gone
    out = (turns - 1) * gradients * gone
    if choice.where == "home":
        inside += parameters * (1.0 - gone)
        out += sizes[Kind.GRADIENT]
    else:
        left = max(stays - parameters - gradients, 0)
        inside += max(moments - left, 0)
        out += 0.0 if choice.rank is not None else float(max(parameters + moments - stays, 0))
    moved = offloaded_bytes(paged) * choice.accumulate
    inside, out = inside + moved, out + moved
    disk = on_disk / max(parameters + moments, 1)
    rates = candidate.rates
    pace_in = (1 - disk) / rates.host.bandwidth_in, disk / rates.disk.bandwidth_in
    outs = rates.host.bandwidth_out, rates.disk.bandwidth_out
    pace_out = (
        (1 - disk) / (outs[0] or rates.host.bandwidth_in),
        disk / (outs[1] or rates.disk.bandwidth_in),
    )
    return inside * max(pace_in), out * max(pace_out)
