"""What a recorded run says about itself to those who run it again: which steps, over which link."""

import math

import numpy as np

from odc.errors import ConfigError
from odc.memory.events import Act
from odc.train.links import load_links
from profiler.reader import TraceReader


def unbroken_steps(reader: TraceReader) -> range:
    """Returns the last traced steps that follow each other: only such can be run again."""
    traced = np.unique(reader.need(columns=("step",))["step"])
    if not len(traced):
        return range(0)
    breaks = np.flatnonzero(np.diff(traced) != 1)
    first = traced[breaks[-1] + 1] if len(breaks) else traced[0]
    return range(int(first), int(traced[-1]) + 1)


def recorded_update_rate(reader: TraceReader) -> float:
    """Returns bytes a second of parameters that the run updated at home; infinite without any."""
    actions = reader.actions(columns=("act", "bytes", "dur_ns"))
    updates = actions["act"] == Act.UPDATE
    duration = int(actions["dur_ns"][updates].sum())
    return float(actions["bytes"][updates].sum()) / duration * 1e9 if duration else math.inf


def recorded_bandwidth(reader: TraceReader) -> float:
    """Returns bytes a second of the link: as the run emulated it, as its loads went, as measured.

    Raises:
        ConfigError: The run loaded nothing.
    """
    emulated = reader.manifest.get("memory", {}).get("link_bandwidth")
    if emulated:
        return float(emulated)
    actions = reader.actions(columns=("act", "bytes", "dur_ns"))
    loads = np.isin(actions["act"], (Act.LOAD, Act.PREFETCH))
    duration = int(actions["dur_ns"][loads].sum())
    if not duration:
        remembered = load_links()
        if remembered is not None:
            home = str(reader.manifest.get("memory", {}).get("home", "host"))
            return remembered.link(home).bandwidth_in
        raise ConfigError(
            f"{reader.run_dir}: has no loads to measure the link by; name it (--link 2GB/s), or "
            "measure this machine's (odc doctor --measure-links)"
        )
    return float(actions["bytes"][loads].sum()) / duration * 1e9
