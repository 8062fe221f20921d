"""Visits of expert sets: which members of a set the computation used, in forward order.

This is what predictors train on. It comes from `need` alone, never from what the manager did.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from profiler.merge import Table, num_rows
from profiler.schema import Kind, Op, Phase


@dataclass(frozen=True)
class SetVisits:
    """Visits (V) of sets (S) with at most M members, in forward order.

    Attributes:
        seq: (V,) i64, station of the visit.
        step: (V,) i32.
        micro: (V,) i16.
        set: (V,) i32, index of the set, from 0 in the order of the model's layers.
        tokens: (V,) i64, largest `tokens` of the visit's rows.
        used: (V, M) bool, members that were needed; ordered by expert, False beyond a set's size.
        member_tokens: (V, M) i64, `tokens` of each member's row.
        num_members: (S,) i32.
        groups: (S, M) i32, group of each member, -1 beyond a set's size.
        layers: (S,) i32, layer of each set.
    """

    seq: np.ndarray
    step: np.ndarray
    micro: np.ndarray
    set: np.ndarray
    tokens: np.ndarray
    used: np.ndarray
    member_tokens: np.ndarray
    num_members: np.ndarray
    groups: np.ndarray
    layers: np.ndarray

    def __len__(self) -> int:
        return len(self.seq)


def set_visits(need: Table, pages: Table, phases: Collection[int] = (Phase.FORWARD,)) -> SetVisits:
    """Return the visits of all sets.

    A visit is one station (`seq`): its rows are the members that were used, in any order. Only
    reads of parameters count.

    Args:
        need: `TraceReader.need()`.
        pages: `TraceReader.pages`.
        phases: Phases whose visits are wanted.
    """
    groups, layers, num_members = _members(pages)
    num_sets, max_members = groups.shape
    size = max(int(groups.max(initial=-1)), int(need["group"].max(initial=-1))) + 1
    set_of = np.full(size + 1, -1, np.int32)  # the last entry serves group -1
    member_of = np.zeros(size + 1, np.int32)
    rows, columns = np.nonzero(groups >= 0)
    set_of[groups[rows, columns]] = rows
    member_of[groups[rows, columns]] = columns

    wanted = np.isin(need["phase"], np.array([int(p) for p in phases], np.uint8))
    wanted &= (need["kind"] == Kind.PARAMETER) & (need["op"] == Op.READ)
    wanted &= set_of[need["group"]] >= 0
    picked = np.flatnonzero(wanted)
    seqs, first, visit = np.unique(need["seq"][picked], return_index=True, return_inverse=True)
    member = member_of[need["group"][picked]]
    used = np.zeros((len(seqs), max_members), bool)
    used[visit, member] = True
    member_tokens = np.zeros((len(seqs), max_members), np.int64)
    np.maximum.at(member_tokens, (visit, member), need["tokens"][picked])
    at = picked[first]
    return SetVisits(
        seq=seqs,
        step=need["step"][at],
        micro=need["micro"][at],
        set=set_of[need["group"][at]],
        tokens=member_tokens.max(axis=1, initial=0),
        used=used,
        member_tokens=member_tokens,
        num_members=num_members,
        groups=groups,
        layers=layers,
    )


def _members(pages: Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return groups (S, M) by expert, layers (S,) and sizes (S,) of the sets."""
    in_set = np.flatnonzero(pages["set"] >= 0) if num_rows(pages) else np.empty(0, np.int64)
    set_index = pages["set"][in_set]
    num_sets = int(set_index.max(initial=-1)) + 1
    # One row per group: a group has pages of several kinds.
    _, first = np.unique(pages["group"][in_set], return_index=True)
    members = in_set[first]
    members = members[np.lexsort((pages["expert"][members], pages["set"][members]))]
    sizes = np.bincount(pages["set"][members], minlength=num_sets).astype(np.int32)
    groups = np.full((num_sets, int(sizes.max(initial=0))), -1, np.int32)
    starts = np.cumsum(sizes) - sizes
    column = np.arange(len(members)) - starts[pages["set"][members]]
    groups[pages["set"][members], column] = pages["group"][members]
    layers = np.full(num_sets, -1, np.int32)
    layers[pages["set"][members]] = pages["layer"][members]
    return groups, layers, sizes


@dataclass(frozen=True)
class SetUse:
    """How evenly and how widely each set's members are used.

    Attributes:
        visits: (S,) i64.
        counts: (S, M) i64, visits that used a member.
        entropy: (S,) f64, bits of the members' shares over log2(members): 1 is even, 0 is one
            member only; NaN without visits.
        touched: (S,) f64, mean share of the members used in a visit; NaN without visits.
    """

    visits: np.ndarray
    counts: np.ndarray
    entropy: np.ndarray
    touched: np.ndarray


def set_use(visits: SetVisits) -> SetUse:
    """Count how the members of each set are used."""
    num_sets, max_members = visits.groups.shape
    count = np.bincount(visits.set, minlength=num_sets)
    counts = np.zeros((num_sets, max_members), np.int64)
    np.add.at(counts, visits.set, visits.used)
    total = counts.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = counts / total[:, None]
        bits = -np.where(share > 0, share * np.log2(share), 0).sum(axis=1)
        widest = np.log2(visits.num_members)
        entropy = np.where(visits.num_members > 1, bits / widest, 0.0)
        touched = total / (count * visits.num_members)
    seen = count > 0
    return SetUse(
        visits=count,
        counts=counts,
        entropy=np.where(seen, entropy, np.nan),
        touched=np.where(seen, touched, np.nan),
    )
