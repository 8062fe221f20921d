"""Options that tell `odc fit` and `odc train --dry-run` about a machine."""

import argparse
from typing import TYPE_CHECKING

from odc.cli.exits import UsageError

if TYPE_CHECKING:
    from odc.train.config import Config
    from odc.train.fit.accounts import Target
    from odc.train.fit.rates import Told

_LEAST_BYTES = 2 << 20  # a frame
MACHINE = ("device", "host", "disk", "link", "disk_rate", "flops")


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that tell a machine; `odc train --dry-run` has them too."""
    add = parser.add_argument
    add("--device", metavar="SIZE", help="memory of the device; default: this machine's memory")
    add("--host", metavar="SIZE", help="host memory; default: this machine's")
    add("--disk", metavar="SIZE", help="free disk space; default: that of memory.home_dir")
    add("--link", metavar="RATE", help="host memory to device, e.g. 25GB/s; default: measured")
    add("--disk-rate", metavar="RATE", help="of the disk, e.g. 3GB/s; default: measured")
    add("--flops", metavar="RATE", help="of matrix products, e.g. 100T; default: measured")


def machine_of(args: argparse.Namespace, config: "Config | None") -> "Target":
    """The machine that was told; what was not is this one."""
    from odc.memory.home import default_folder
    from odc.memory.ledger import resident_bytes
    from odc.memory.machine import gather
    from odc.sizes import parse_size
    from odc.train.fit.accounts import CONTEXT_BYTES, Target, told_machine

    device, host, disk = (
        None if text is None else parse_size(text) for text in (args.device, args.host, args.disk)
    )
    for option, size in (("--device", device), ("--host", host), ("--disk", disk)):
        if size is not None and 0 < size < _LEAST_BYTES:
            raise UsageError(f"{option}: got {size} bytes; allowed: sizes with a unit, as in 24GB")
    here = gather(default_folder(None if config is None else config.memory.home_dir))
    assert here.folder is not None, "it was asked for"
    machine = here
    if host is not None or disk is not None:
        has = here.folder.free_bytes if host is None else 0
        machine = told_machine(host or here.total_bytes, has if disk is None else disk)
    card = host is not None
    if device is None:
        limit = None if config is None else config.memory.total_mem
        device = limit or machine.free_bytes
    base = resident_bytes()[0]
    return Target(device, machine, base, CONTEXT_BYTES if card else 0, shared=not card)


def told_of(args: argparse.Namespace, config: "Config | None") -> "Told":
    """The rates that were told."""
    from odc.sizes import parse_rate
    from odc.train.fit.rates import Told

    link = None if args.link is None else float(parse_rate(args.link))
    folder = None
    if config is not None:
        folder = config.memory.home_dir
        link = link or config.memory.link_bandwidth
    return Told(
        flops=None if args.flops is None else _flops(args.flops),
        link=link,
        disk_rate=None if args.disk_rate is None else float(parse_rate(args.disk_rate)),
        folder=folder,
        card=args.host is not None,
    )


def _flops(text: str) -> float:
    units = {"G": 1e9, "T": 1e12, "P": 1e15}
    number, unit = text.strip().removesuffix("flops").strip(), 1.0
    if number and number[-1].upper() in units:
        number, unit = number[:-1], units[number[-1].upper()]
    try:
        found = float(number) * unit
    except ValueError:
        found = 0.0
    if not found > 0:
        raise UsageError(f"--flops: got {text!r}; allowed: a number above 0 with G, T or P: 150T")
    return found
