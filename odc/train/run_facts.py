"""What a run says of itself: a line for each step, and the facts of its summary."""

from collections.abc import Iterable
from typing import Any

from odc.fsdp.group import ParamGroup
from odc.memory.events import StepRow
from odc.memory.home import Home
from odc.memory.pager import Counters


def places_of_updates(groups: Iterable[ParamGroup]) -> dict[str, list[str]]:
    """Which groups are updated where, by name; the device's and the home's."""
    found: dict[str, list[str]] = {"device": [], "home": []}
    for group in groups:
        if group.trainable:
            found["home" if group.spec.at_home else "device"].append(group.spec.name)
    return found


def used_tiers(home: Home) -> dict[str, dict[str, int]]:
    """What each tier of the home holds and has moved in this process, building included."""
    return {
        tier.name.lower(): {
            "home_bytes": used.num_bytes,
            "bytes_in": used.bytes_in,
            "bytes_out": used.bytes_out,
            "update_read_bytes": used.read_bytes,
            "update_written_bytes": used.written_bytes,
        }
        for tier, used in home.traffic.items()
    }


def common_metrics(row: StepRow) -> dict[str, Any]:
    """What a line of `metrics.jsonl` begins with, paged or sharded."""
    return {
        "step": row.step,
        "epoch": row.epoch,
        "loss": row.loss,
        "tokens": row.tokens,
        "step_s": row.step_ns / 1e9,
        "compute_s": row.compute_ns / 1e9,
    }


def step_metrics(row: StepRow, counters: Counters, activation_bytes: int) -> dict[str, Any]:
    """A step's line of `metrics.jsonl`; `activation_bytes` were kept for backward at most."""
    return {
        **common_metrics(row),
        "stall_s": row.stall_ns / 1e9,
        "bytes_in": row.bytes_in,
        "bytes_out": row.bytes_out,
        "page_bytes": row.page_bytes,
        "peak_page_bytes": row.peak_page_bytes,
        "transient_bytes": row.transient_bytes,
        "activation_bytes": activation_bytes,
        "activation_bytes_in": counters.activation_bytes_in,
        "activation_bytes_out": counters.activation_bytes_out,
        "misses": counters.misses,
    }
