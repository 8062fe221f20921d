"""Splits, labels and running features, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from predictor.features import (
    HELD_OUT,
    TRAIN,
    VALIDATION,
    Structure,
    join_runs,
    labelled_rows,
    last_visits,
    make_features,
    next_visits,
    split_by_time,
)


def test_labels_are_the_next_visits_within_the_run(random_visits):
    visits = join_runs([random_visits(passes=3, seed=0), random_visits(passes=2, seed=1)])
    following, previous = next_visits(visits), last_visits(visits)
    for row in range(len(visits)):
        for index in range(visits.structure.num_sets):
            same = (visits.run == visits.run[row]) & (visits.set_index == index)
            later = np.flatnonzero(same & (np.arange(len(visits)) > row))
            sooner = np.flatnonzero(same & (np.arange(len(visits)) <= row))
            assert following[row, index] == (later[0] if len(later) else -1)
            assert previous[row, index] == (sooner[-1] if len(sooner) else -1)


def test_parts_follow_one_another_in_time_and_never_share_a_step(random_visits):
    visits = join_runs([random_visits(passes=40), random_visits(passes=20, seed=1)])
    part = split_by_time(visits)
    for run in (0, 1):
        rows = visits.run == run
        assert (np.diff(part[rows].astype(int)) >= 0).all()
        assert set(part[rows]) == {TRAIN, VALIDATION, HELD_OUT}
        for step in np.unique(visits.step[rows]):
            assert len(set(part[rows & (visits.step == step)])) == 1


def test_no_label_of_training_is_a_visit_of_a_later_part(random_visits):
    visits = random_visits(passes=40)
    part = split_by_time(visits)
    rows = labelled_rows(visits, part, TRAIN)
    assert (part[next_visits(visits)[rows]] == TRAIN).all()


def test_features_know_nothing_of_the_future(random_visits):
    visits = random_visits(passes=20)
    cut = 33
    rows = np.arange(cut)
    whole, start = make_features(visits, rows), make_features(visits.take(rows), rows)
    np.testing.assert_array_equal(whole.masks, start.masks)
    np.testing.assert_array_equal(whole.surprise[:cut], start.surprise)
    np.testing.assert_array_equal(whole.base_logits(rows), start.base_logits(rows))


def test_masks_hold_this_pass_and_the_last(dependent_visits):
    visits = dependent_visits(passes=3, num_sets=3, members=8)
    masks = make_features(visits, np.arange(9)).masks
    this_pass, last_pass = masks[:, :24].reshape(9, 3, 8), masks[:, 24:48].reshape(9, 3, 8)
    row = 4  # set 1 of the second pass
    np.testing.assert_array_equal(this_pass[row, :2], visits.used[3:5])
    assert (this_pass[row, 2] == 0).all()
    np.testing.assert_array_equal(last_pass[row], visits.used[:3])
    np.testing.assert_array_equal(masks[row, 48:51], [0, 1, 0])


def test_runs_of_different_models_are_not_joined(random_visits):
    with pytest.raises(ValueError, match="different models"):
        join_runs([random_visits(members=16), random_visits(members=8)])


def test_the_hash_tells_layouts_apart():
    structures = [
        Structure.regular(2, 3),
        Structure.regular(3, 2),
        Structure((((0, 0), (0, 1), (0, 2)), ((2, 0), (2, 1), (2, 2)))),
    ]
    assert len({structure.hash for structure in structures}) == 3
    for structure in structures:
        assert Structure.from_json(structure.to_json()).hash == structure.hash
