"""The answer of `odc fit`: does it fit, how fast is it, which settings, and what would help."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from odc.memory.frames import FRAME_BYTES
from odc.sizes import format_bytes
from odc.train.fit.accounts import Accounts, Rest, Target, account, rest_of
from odc.train.fit.choice import Choice, overrides
from odc.train.fit.groups import page
from odc.train.fit.model import ModelShape
from odc.train.fit.predict import Prediction
from odc.train.fit.rates import Rates
from odc.train.fit.search import Fixed, Search


@dataclass(frozen=True)
class Answer:
    """What `odc fit` found.

    Attributes:
        model, target, rates: What was asked, and where.
        line: The answer in a line.
        fits: Whether some settings work.
        choice, accounts, prediction: Of the best settings; `None` where nothing fits.
        largest_micro_batch: Under otherwise these settings.
        helps: What would help, where it does not fit or the link is what limits.
        asked: Whether the choice is the user's own, not a search's.
    """

    model: ModelShape
    target: Target
    rates: Rates
    line: str
    fits: bool
    choice: Choice | None = None
    accounts: Accounts | None = None
    prediction: Prediction | None = None
    largest_micro_batch: int = 0
    helps: list[str] = field(default_factory=list)
    asked: bool = False

    def as_json(self) -> dict[str, Any]:
        """Returns all of it as JSON values."""
        found: dict[str, Any] = {
            "model": self.model.name,
            "parameters": self.model.numel,
            "active_parameters": self.model.active_numel,
            "answer": self.line,
            "fits": self.fits,
            "helps": self.helps,
            "rates": rates_json(self.rates),
        }
        if self.choice is not None and self.accounts is not None:
            found |= {
                "largest_micro_batch": self.largest_micro_batch,
                "device": device_accounts(self.accounts),
                "device_peak": self.accounts.device_peak,
                "host": self.accounts.host,
                "disk": self.accounts.disk,
                "least_page_budget": self.accounts.least_pages,
                "warnings": list(self.accounts.warnings),
                "settings": overrides(self.choice),
            }
        if self.prediction is not None:
            found["speed"] = prediction_json(self.prediction)
        return found


def rates_json(rates: Rates) -> dict[str, Any]:
    """Rates as JSON values."""
    return {
        "flops": rates.flops,
        "update_s_per_parameter": rates.update_s,
        "host_bytes_s": rates.host.bandwidth_in,
        "disk_bytes_s": rates.disk.bandwidth_in,
        "sources": rates.sources,
    }


def prediction_json(made: Prediction) -> dict[str, Any]:
    """A prediction as JSON values."""
    low, high = made.range_tokens_s
    return vars(made) | {
        "tokens_s": made.tokens_s,
        "tokens_s_range": [low, high],
        "bound_tokens_s": made.bound_tokens_s,
    }


def device_accounts(accounts: Accounts) -> dict[str, int]:
    """What the device holds at its peak, by account."""
    rest = accounts.rest
    found = {
        "pages": accounts.pages,
        "activations": rest.activations,
        "logits and loss": rest.loss,
        "gradients in flight": rest.gradients,
        "transients": rest.transients,
        "libraries": rest.libraries,
        "allocator": rest.allocator,
        "driver": accounts.context,
    }
    return {name: size for name, size in found.items() if size}


def find_answer(
    model: ModelShape, fixed: Fixed, target: Target, rates: Rates, threads: int = 1
) -> Answer:
    """Searches for the best settings."""
    search = Search(model, fixed, target, rates, threads)
    resident = search.resident()
    if resident is not None:
        line = "fits with everything resident: no paging needed, use memory.total_mem=unlimited"
        largest = _largest_resident(search, resident.choice)
        choice = replace(resident.choice, micro_batch=fixed.micro_batch or largest)
        return _settled(search, choice, line, largest)
    best = search.best()
    if best is None:
        return _nothing(search)
    largest = search.largest_micro_batch(best.choice)
    where = {"host": "host memory", "disk": "disk", "host+disk": "host memory and disk"}
    line = f"fits with paging: the rest of its state lives in {where[best.choice.home]}"
    return _settled(search, best.choice, line, largest)


def judge(model: ModelShape, choice: Choice, target: Target, rates: Rates, threads: int) -> Answer:
    """The answer for settings that somebody has chosen."""
    fixed = Fixed(choice.seq_len, choice.dtype, choice.rank)
    search = Search(model, fixed, target, rates, threads)
    accounts = search.exact_accounts(choice)
    if not accounts.fits:
        line = "does not fit: " + "; ".join(accounts.problems)
        helps = _helps(search, choice, accounts.rest)
        return Answer(
            model, target, rates, line, False, choice, accounts, None, 0, helps, asked=True
        )
    largest = search.largest_micro_batch(choice)
    made = _settled(search, choice, "fits", largest)
    return replace(made, asked=True)


def _settled(search: Search, choice: Choice, line: str, largest: int) -> Answer:
    accounts = search.exact_accounts(choice)
    made = search.predict(choice, accounts)
    helps = [] if made.limit == "compute" else [_FASTER[made.limit]]
    if choice.rank is not None:
        helps = [text.replace(_ADAPTERS, "") for text in helps]
    return Answer(
        search.whole,
        search.target,
        search.rates,
        line,
        True,
        choice,
        accounts,
        made,
        largest,
        helps,
    )


_ADAPTERS = ", or adapters (--method lora)"
_FASTER = {
    "link": f"the link limits: more micro-batches a step (train.accumulate){_ADAPTERS}, or a "
    "device with more memory move fewer bytes for each token",
    "disk": f"the disk limits: more host memory or a faster disk{_ADAPTERS}",
}


def _largest_resident(search: Search, choice: Choice) -> int:
    """The most sequences at which everything is still resident."""
    micro = 1
    for tried in (2, 4, 8, 16, 32, 64):
        made = search.candidate(replace(choice, micro_batch=tried))
        if made.paged.all_bytes + made.accounts.rest.total <= search.target.usable:
            micro = tried
    return micro


def _nothing(search: Search) -> Answer:
    """No settings work: for ever, or on this machine."""
    fixed, model, target = search.fixed, search.whole, search.target
    smallest = replace(search._base(1), mode="offload", page_size=8 * FRAME_BYTES)
    paged = page(model, smallest)
    least, owner = paged.least
    rest = rest_of(paged)
    if least + rest.total > target.usable:
        line = (
            f"no setting helps: the largest group ({owner.unit.name}) needs {format_bytes(least)}, "
            f"activations of one sequence of {fixed.seq_len} {format_bytes(rest.total)}, and the "
            f"device has {format_bytes(target.usable)}"
        )
    else:
        accounts = account(paged, target)
        line = "does not fit: " + "; ".join(accounts.problems or ("no settings were found",))
    return Answer(model, target, search.rates, line, False, helps=_helps(search, smallest, rest))


def _helps(search: Search, choice: Choice, rest: Rest) -> list[str]:
    """What to change, each tried: it would fit."""
    model, target = search.whole, search.target
    found = []

    def fits(**changes: Any) -> bool:
        changed = replace(choice, **changes)
        where = target
        if changed.total_mem is not None and changed.total_mem > target.usable:
            return False
        return account(page(model, changed), where).fits

    if choice.micro_batch > 1 and fits(micro_batch=1):
        found.append("train.micro_batch=1")
    if choice.mode == "keep" and fits(mode="checkpoint"):
        found.append("activation checkpointing")
    if choice.seq_len > 256 and fits(seq_len=choice.seq_len // 2):
        found.append(f"sequences of {choice.seq_len // 2} tokens")
    if choice.rank is None and fits(rank=16):
        found.append("adapters over a frozen model (--method lora)")
    for home in ("host+disk", "disk"):
        if choice.home != home and fits(home=home):
            found.append(f"memory.home={home}")
            break
    if not found:
        least = page(model, choice).least[0] + rest.total
        found.append(
            f"a device of {format_bytes(math.ceil(1.05 * least))} or more, and "
            f"{format_bytes(page(model, choice).table.home_bytes)} of host memory and disk together"
        )
    return found
