"""Analysis agrees with slow, obvious counts."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from profiler import analysis
from profiler.analysis import Residency
from profiler.layout import empty_pages
from profiler.schema import ACTIONS, COMM, NEED, PAGE_COLUMNS, Act, CommOp, Kind, Op, Phase, Tier

DEVICE, HOST = int(Tier.DEVICE), int(Tier.HOST)


def table(stream: Any, rows: list[dict[str, int]]) -> dict[str, np.ndarray]:
    """Return a stream's columns; what a row leaves out is 0."""
    return {
        c.name: np.array([row.get(c.name, 0) for row in rows], c.numpy_type) for c in stream.columns
    }


def pages_of(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    missing = {"module_path": "", "layer": -1, "expert": -1, "set": -1}
    return {name: np.array([row.get(name, missing.get(name, 0)) for row in rows])
            for name in PAGE_COLUMNS}  # fmt: skip


def action(t_ns: int, page: int, act: Act, **more: int) -> dict[str, int]:
    ends = {
        Act.LOAD: (HOST, DEVICE),
        Act.PREFETCH: (HOST, DEVICE),
        Act.CANCEL: (HOST, DEVICE),
        Act.DROP: (DEVICE, DEVICE),
    }
    src, dst = ends.get(act, (DEVICE, HOST))
    return {"t_ns": t_ns, "page": page, "act": act, "src": src, "dst": dst, "seq": -1, **more}


def stays(intervals: analysis.Intervals, page: int) -> list[tuple[int, int, int]]:
    mine = intervals.page == page
    columns = (intervals.tier, intervals.start_ns, intervals.end_ns)
    return list(zip(*(c[mine].tolist() for c in columns), strict=True))


def test_a_page_first_seen_leaving_was_resident_from_the_start() -> None:
    actions = table(
        ACTIONS,
        [
            action(10, 7, Act.PREFETCH, dur_ns=5),
            action(20, 3, Act.EVICT),
            action(30, 3, Act.LOAD, dur_ns=2),
            action(40, 7, Act.EVICT),
        ],
    )
    found = analysis.residency_intervals(actions)
    assert stays(found, 3) == [(DEVICE, 10, 20), (HOST, 20, 30), (DEVICE, 30, 41)]
    assert stays(found, 7) == [(DEVICE, 10, 40), (HOST, 40, 41)]


def test_rows_may_come_in_order_of_completion() -> None:
    rows = [
        action(20, 3, Act.EVICT),
        action(50, 9, Act.EVICT),
        action(30, 3, Act.LOAD, dur_ns=25),
        action(0, 5, Act.STALL, wait_ns=3),
    ]
    found = analysis.residency_intervals(table(ACTIONS, rows))
    assert stays(found, 3) == [(DEVICE, 0, 20), (HOST, 20, 30), (DEVICE, 30, 56)]
    assert stays(found, 5) == []


def test_a_dropped_page_is_nowhere_until_it_is_created_again() -> None:
    pages = pages_of([{"page": 0, "group": 4, "kind": 1}, {"page": 1, "group": 4, "kind": 0}])
    need = table(
        NEED,
        [
            {"t_ns": 10, "group": 4, "kind": 1, "op": Op.CREATE},
            {"t_ns": 12, "group": 4, "kind": 0, "op": Op.READ},
            {"t_ns": 50, "group": 4, "kind": 1, "op": Op.CREATE},
        ],
    )
    actions = table(ACTIONS, [action(30, 0, Act.DROP), action(60, 0, Act.EVICT)])
    found = analysis.residency_intervals(actions, need=need, pages=pages)
    assert stays(found, 0) == [(DEVICE, 10, 30), (DEVICE, 50, 60), (HOST, 60, 61)]
    assert stays(found, 1) == []


def test_a_cancelled_prefetch_leaves_the_page_at_home() -> None:
    rows = [action(0, 1, Act.EVICT), action(10, 2, Act.CANCEL), action(20, 2, Act.LOAD)]
    found = analysis.residency_intervals(table(ACTIONS, rows))
    assert stays(found, 2) == [(HOST, 0, 20), (DEVICE, 20, 21)]


def test_a_cancelled_write_back_changes_nothing() -> None:
    cancelled = action(10, 1, Act.CANCEL, src=DEVICE, dst=HOST)
    rows = [action(0, 1, Act.LOAD), cancelled, action(20, 1, Act.EVICT)]
    found = analysis.residency_intervals(table(ACTIONS, rows))
    assert stays(found, 1) == [(DEVICE, 0, 20), (HOST, 20, 21)]


def test_a_session_begins_without_what_the_one_before_left() -> None:
    rows = [action(0, 1, Act.LOAD), action(10, 2, Act.LOAD), action(100, 1, Act.LOAD),
            action(120, 1, Act.EVICT)]  # fmt: skip
    actions = {**table(ACTIONS, rows), "session": np.array([1, 1, 2, 2], np.int16)}
    found = analysis.residency_intervals(actions)
    assert stays(found, 1) == [(DEVICE, 0, 11), (DEVICE, 100, 120), (HOST, 120, 121)]
    assert stays(found, 2) == [(HOST, 0, 10), (DEVICE, 10, 11)]


def test_no_actions_give_no_intervals_and_an_unknown_matrix() -> None:
    found = analysis.residency_intervals(table(ACTIONS, []))
    assert len(found) == 0
    matrix = analysis.residency_matrix(found, np.arange(3), 4)
    assert (matrix.codes == Residency.UNKNOWN).all() and matrix.codes.shape == (3, 4)


@pytest.mark.parametrize("seed", range(5))
def test_the_residency_matrix_is_the_state_at_each_bins_middle(seed: int) -> None:
    rng = random.Random(seed)
    rows, on_device = [], [rng.random() < 0.5 for _ in range(6)]
    first = list(on_device)
    log: list[tuple[int, int, bool]] = []
    for t in range(1, 200):
        page = rng.randrange(5)  # page 5 never moves
        on_device[page] = not on_device[page]
        act = rng.choice([Act.LOAD, Act.PREFETCH]) if on_device[page] else Act.EVICT
        rows.append(action(t * 10, page, act))
        log.append((t * 10, page, on_device[page]))
    rng.shuffle(rows)
    intervals = analysis.residency_intervals(table(ACTIONS, rows))
    matrix = analysis.residency_matrix(intervals, np.arange(6), 37)
    for page in range(6):
        for column in range(37):
            low, high = matrix.edges_ns[column : column + 2]
            middle = low + (high - low) // 2
            state = first[page]
            for t, moved, now in log:
                if moved == page and t <= middle:
                    state = now
            expected = Residency.DEVICE if state else Residency.HOME
            if page == 5:
                expected = Residency.UNKNOWN
            assert matrix.codes[page, column] == expected, (page, column)


def random_steps(rng: random.Random) -> tuple[list[dict], list[dict], list[dict]]:
    """Return needs, actions and pages: groups 10..14, two pages each and one without."""
    pages = [{"page": p, "group": 10 + p // 2, "kind": p % 2} for p in range(10)]
    needs, actions, t = [], [], 0
    for seq in range(120):
        t += rng.randrange(1, 9)
        group, kind = 10 + rng.randrange(6), rng.randrange(2)
        needs.append({"seq": seq, "t_ns": t, "step": 3 + seq // 40, "group": group, "kind": kind})
        if rng.random() < 0.5 and group < 15:
            page = (group - 10) * 2 + kind
            actions.append(action(t + 1, page, Act.LOAD, seq=seq, bytes=rng.randrange(99)))
            actions.append(action(t + 1, page, Act.STALL, seq=seq, wait_ns=rng.randrange(99)))
        if rng.random() < 0.3:
            act = rng.choice([Act.PREFETCH, Act.WRITE_BACK, Act.EARLY_WRITE_BACK, Act.EVICT])
            actions.append(action(t, rng.randrange(10), act, bytes=rng.randrange(99)))
    return needs, actions, pages


@pytest.mark.parametrize("seed", range(5))
def test_group_and_byte_tables_equal_plain_counts(seed: int) -> None:
    needs, acts, page_rows = random_steps(random.Random(seed))
    need, actions, pages = table(NEED, needs), table(ACTIONS, acts), pages_of(page_rows)
    order = np.random.default_rng(seed).permutation(len(acts))
    found = analysis.group_steps(need, analysis.select(actions, order), pages)
    step_of = {n["seq"]: n["step"] for n in needs}
    group_of = {p["page"]: p["group"] for p in page_rows}

    def step_at(a: dict) -> int:
        if a["seq"] >= 0:
            return step_of[a["seq"]]
        return max((n["t_ns"], n["step"]) for n in needs if n["t_ns"] <= a["t_ns"])[1]

    assert found.steps.tolist() == [3, 4, 5]
    for row, group in enumerate(found.groups.tolist()):
        for column, step in enumerate(found.steps.tolist()):
            here = [a for a in acts if group_of[a["page"]] == group and step_at(a) == step]
            assert found.accesses[row, column] == sum(
                n["group"] == group and n["step"] == step for n in needs
            )
            assert found.misses[row, column] == sum(a["act"] == Act.LOAD for a in here)
            stall = sum(a["wait_ns"] for a in here if a["act"] == Act.STALL)
            assert found.stall_ns[row, column] == stall
    assert found.stall_per_group.sum() == sum(a.get("wait_ns", 0) for a in acts)

    traffic = analysis.bytes_per_step(actions, need)
    for column, step in enumerate(traffic["step"].tolist()):
        here = [a for a in acts if step_at(a) == step]
        for name, wanted in [
            ("bytes_in", (Act.LOAD, Act.PREFETCH)),
            ("bytes_out", (Act.WRITE_BACK, Act.EARLY_WRITE_BACK)),
            ("prefetched", (Act.PREFETCH,)),
        ]:
            total = sum(a["bytes"] for a in here if a["act"] in wanted)
            assert traffic[name][column] == total

    gradients = analysis.group_steps(need, actions, pages, Kind.GRADIENT)
    assert gradients.accesses.sum() == sum(n["kind"] == 1 for n in needs)
    assert gradients.misses.sum() == sum(
        a["act"] == Act.LOAD and page_rows[a["page"]]["kind"] == 1 for a in acts
    )


def test_an_action_belongs_to_the_step_of_the_need_it_served() -> None:
    need = table(NEED, [{"seq": s, "t_ns": s * 10, "step": s // 2} for s in range(4)])
    rows = [
        action(25, 0, Act.LOAD, seq=1),  # served step 0, was recorded in step 1
        action(25, 0, Act.EVICT),
        action(-5, 0, Act.EVICT),
        action(15, 0, Act.STALL, seq=99),  # of a need that was not read
    ]
    assert analysis.action_steps(table(ACTIONS, rows), need).tolist() == [0, 1, 0, 0]
    assert analysis.action_steps(table(ACTIONS, rows), table(NEED, [])).tolist() == [-1] * 4


def set_pages() -> dict[str, np.ndarray]:
    """Return two sets: 3 experts in groups 5, 3, 4 (in this order) and 2 in groups 8, 9."""
    members = [(5, 0, 0), (3, 0, 1), (4, 0, 2), (8, 1, 0), (9, 1, 1)]
    rows: list[dict[str, Any]] = [{"page": 0, "group": 0, "kind": 0}]
    for group, index, expert in members:
        for kind in (0, 1, 2):
            rows.append(
                {"page": len(rows), "group": group, "kind": kind, "set": index, "expert": expert,
                 "layer": index + 1}
            )  # fmt: skip
    return pages_of(rows)


def test_visits_are_in_forward_order_with_members_by_expert() -> None:
    def row(seq: int, group: int, **more: int) -> dict[str, int]:
        return {"seq": seq, "step": 2, "group": group, "tokens": 50, **more}

    need = table(
        NEED,
        [
            row(0, 0),  # in no set
            row(1, 4), row(1, 5),  # experts 2 and 0, in the order they ran
            row(2, 9),
            row(3, 8, phase=Phase.BACKWARD),
            row(3, 8, kind=Kind.GRADIENT, op=Op.CREATE, phase=Phase.BACKWARD),
            row(4, 3, micro=1, tokens=60), row(4, 3, micro=1, op=Op.WRITE),
            row(5, 8, phase=Phase.EVALUATION),
        ],
    )  # fmt: skip
    visits = analysis.set_visits(need, set_pages())
    assert visits.groups.tolist() == [[5, 3, 4], [8, 9, -1]]
    assert visits.num_members.tolist() == [3, 2] and visits.layers.tolist() == [1, 2]
    assert visits.seq.tolist() == [1, 2, 4]
    assert visits.set.tolist() == [0, 1, 0] and visits.micro.tolist() == [0, 0, 1]
    assert visits.tokens.tolist() == [50, 50, 60]
    assert visits.used.tolist() == [[True, False, True], [False, True, False], [False, True, False]]
    assert visits.member_tokens.tolist() == [[50, 0, 50], [0, 50, 0], [0, 60, 0]]
    both = analysis.set_visits(need, set_pages(), (Phase.FORWARD, Phase.EVALUATION))
    assert both.seq.tolist() == [1, 2, 4, 5]


def test_a_model_without_sets_has_no_visits() -> None:
    need = table(NEED, [{"seq": 0, "group": 0}])
    visits = analysis.set_visits(need, pages_of([{"page": 0, "group": 0}]))
    assert len(visits) == 0 and visits.used.shape == (0, 0)
    visits = analysis.set_visits(need, empty_pages())
    assert len(visits) == 0 and len(analysis.set_use(visits).entropy) == 0


def test_entropy_and_touched_share_follow_their_formulas() -> None:
    rows = []
    for seq, groups in enumerate([(5, 3), (5, 4), (5, 3), (8,)]):
        rows += [{"seq": seq, "group": g} for g in groups]
    use = analysis.set_use(analysis.set_visits(table(NEED, rows), set_pages()))
    assert use.visits.tolist() == [3, 1]
    assert use.counts.tolist() == [[3, 2, 1], [1, 0, 0]]
    bits = -sum(p * math.log2(p) for p in (3 / 6, 2 / 6, 1 / 6))
    assert use.entropy.tolist() == pytest.approx([bits / math.log2(3), 0.0])
    assert use.touched.tolist() == pytest.approx([6 / 9, 1 / 2])


def collective(op: CommOp, num_bytes: int, ranks: list[int], root: int = 0) -> list[dict]:
    return [
        {"rank": r, "op": op, "src": root if op == CommOp.BROADCAST else r, "dst": -1,
         "bytes": num_bytes}
        for r in ranks
    ]  # fmt: skip


def comm_table(rows: list[dict]) -> dict[str, np.ndarray]:
    return {**table(COMM, rows), "rank": np.array([r["rank"] for r in rows], np.int16)}


HAND_COUNTED = [  # 4 ranks, 1200 bytes
    (CommOp.ALL_GATHER, {(0, 1): 900, (1, 2): 900, (2, 3): 900, (3, 0): 900}),
    (CommOp.REDUCE_SCATTER, {(0, 1): 900, (1, 2): 900, (2, 3): 900, (3, 0): 900}),
    (CommOp.ALL_REDUCE, {(0, 1): 1800, (1, 2): 1800, (2, 3): 1800, (3, 0): 1800}),
    (CommOp.BROADCAST, {(2, 3): 1200, (3, 0): 1200, (0, 1): 1200}),
    (CommOp.ALL_TO_ALL, {(a, b): 300 for a in range(4) for b in range(4) if a != b}),
    (CommOp.BARRIER, {}),
    (CommOp.OTHER, {}),
]


@pytest.mark.parametrize(("op", "expected"), HAND_COUNTED)
def test_a_collective_on_a_ring_moves_the_hand_counted_bytes(
    op: CommOp, expected: dict[tuple[int, int], int]
) -> None:
    comm = comm_table(collective(op, 1200, [0, 1, 2, 3], root=2))
    matrix = analysis.comm_matrix(comm, 4)
    found = dict(zip(zip(matrix.src.tolist(), matrix.dst.tolist(), strict=True),
                     matrix.bytes.tolist(), strict=True))  # fmt: skip
    assert found == expected
    assert matrix.model == "ring" and matrix.modelled == bool(expected)
    assert matrix.dense().sum(axis=1).tolist() == analysis.sent_bytes(comm, 4).tolist()


def test_transfers_are_counted_once_as_measured() -> None:
    rows = [
        {"rank": 0, "op": CommOp.SEND, "src": 0, "dst": 2, "bytes": 70},
        {"rank": 2, "op": CommOp.RECV, "src": 0, "dst": 2, "bytes": 70},
        {"rank": 0, "op": CommOp.SEND, "src": 0, "dst": 2, "bytes": 70},
    ]
    matrix = analysis.comm_matrix(comm_table(rows), 3)
    assert matrix.dense().tolist() == [[0, 0, 140], [0, 0, 0], [0, 0, 0]]
    assert matrix.count.tolist() == [2] and not matrix.modelled


def test_bytes_are_conserved_over_a_mixture_with_process_groups() -> None:
    rng = random.Random(1)
    groups = {"0": [0, 1, 2, 3], "1": [1, 3], "2": [0, 2]}
    rows = []
    for _ in range(60):
        pg = rng.choice(list(groups))
        op = CommOp(rng.randrange(5))
        made = collective(op, rng.randrange(1, 9999), groups[pg], rng.choice(groups[pg]))
        rows += [{**row, "pg": int(pg)} for row in made]
    comm = comm_table(rows)
    matrix = analysis.comm_matrix(comm, 4, process_groups=groups)
    sent = analysis.sent_bytes(comm, 4, groups)
    assert matrix.dense().sum(axis=1).tolist() == sent.tolist()
    assert (matrix.src != matrix.dst).all()
    per_step = analysis.comm_per_step(comm)
    assert per_step["bytes"].sum() == comm["bytes"].sum() and per_step["count"].sum() == len(rows)


def test_one_rank_sends_nothing_and_an_unknown_model_is_refused() -> None:
    comm = comm_table(collective(CommOp.ALL_REDUCE, 100, [0]))
    assert analysis.comm_matrix(comm, 1).dense().tolist() == [[0]]
    assert len(analysis.comm_per_step(comm_table([]))["step"]) == 0
    with pytest.raises(ValueError, match="model must be one of ring, got 'tree'"):
        analysis.comm_matrix(comm, 1, model="tree")


def test_the_steps_table_accounts_for_the_whole_step() -> None:
    steps = {
        "step": np.array([1, 2]), "tokens": np.array([100, 0]),
        "step_ns": np.array([2 * 10**9, 0]), "compute_ns": np.array([10**9, 0]),
        "stall_ns": np.array([5 * 10**8, 0]), "comm_ns": np.array([10**8, 0]),
        "profiler_ns": np.array([10**8, 0]),
    }  # fmt: skip
    found = analysis.steps_table(steps)
    assert found["other_ns"].tolist() == [3 * 10**8, 0]
    assert found["tokens_per_s"][0] == 50 and found["stall_share"][0] == 0.25
    assert math.isnan(found["tokens_per_s"][1]) and found["profiler_share"][0] == 0.05
