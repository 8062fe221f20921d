"""What `odc doctor` says of the network between ranks: NCCL's threads, queues of cards, RDMA.

The advice of features.md A9, with its reason and the state of this machine. It matters to
several nodes only, so nothing here is ever a problem.
"""

import array
import fcntl
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from odc.train.findings import Finding, advice, ok

_LEAST_QUEUE = 256
_NCCL = {"NCCL_NSOCKS_PERTHREAD": "4", "NCCL_SOCKET_NTHREADS": "2"}
_SIOCETHTOOL, _ETHTOOL_GRINGPARAM = 0x8946, 0x10


@dataclass(frozen=True)
class Rings:
    """Queues of a network card, in packets: what they are and what they may be."""

    rx: int
    tx: int
    rx_max: int
    tx_max: int


def network(root: Path, env: Mapping[str, str], rings: Mapping[str, Rings]) -> Iterator[Finding]:
    """Findings on the network.

    Args:
        root: Where `sys` is.
        env: Environment of the process.
        rings: Queues of each card that tells.
    """
    rdma = sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))
    cards = network_cards(root)
    yield _nccl(env, rdma)
    if not cards:
        yield ok("network cards", "none")
    for card in cards:
        yield _queues(card, rings.get(card), rdma)
    if rdma:
        yield ok("RDMA", ", ".join(rdma), "NCCL uses it instead of sockets")


def network_cards(root: Path = Path("/")) -> list[str]:
    """Cards of the machine, without bridges, tunnels and the loopback."""
    folders = (root / "sys/class/net").glob("*")
    return sorted(folder.name for folder in folders if (folder / "device").exists())


def _nccl(env: Mapping[str, str], rdma: list[str]) -> Finding:
    said = ", ".join(f"{name}={env.get(name, 'not set')}" for name in _NCCL)
    why = (
        "NCCL over TCP sends on few sockets, which one core copies; 4 sockets on each of 2 threads "
        "fill a fast card. Without effect over RDMA and between GPUs of one machine"
    )
    how = "export " + " ".join(f"{name}={value}" for name, value in _NCCL.items())
    if rdma or all(env.get(name) == value for name, value in _NCCL.items()):
        return ok("NCCL sockets", said, why)
    return ok("NCCL sockets", f"{said} (for several nodes over Ethernet)", why, how)


def _queues(card: str, rings: Rings | None, rdma: list[str]) -> Finding:
    subject = f"queues of {card}"
    if rings is None:
        return ok(subject, "not told by the driver (usual for virtual cards)")
    said = f"rx {rings.rx} (at most {rings.rx_max}), tx {rings.tx} (at most {rings.tx_max})"
    why = "a queue that overflows under RDMA shows as time-outs that nothing explains"
    if min(rings.rx, rings.tx) >= _LEAST_QUEUE or max(rings.rx_max, rings.tx_max) < _LEAST_QUEUE:
        return ok(subject, said, why)
    rx, tx = min(rings.rx_max, 1024), min(rings.tx_max, 1024)
    how = f"sudo ethtool -G {card} rx {rx} tx {tx}"
    return advice(subject, said, why if rdma else f"{why}; several nodes only", how)


def read_rings(cards: list[str]) -> dict[str, Rings]:
    """Asks the drivers, as `ethtool -g` does; those that do not tell are left out."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        for card in cards:
            # struct ethtool_ringparam: cmd, the four largest sizes, the four current ones
            told = array.array("I", [_ETHTOOL_GRINGPARAM, *[0] * 8])
            address, _ = told.buffer_info()
            request = struct.pack("16sP16x", card.encode()[:15], address)
            try:
                fcntl.ioctl(channel, _SIOCETHTOOL, request)
            except OSError:
                continue
            found[card] = Rings(rx=told[5], tx=told[8], rx_max=told[1], tx_max=told[4])
    return found
