"""Predictor directories: what is written is read back, what is damaged is refused with advice."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from safetensors.numpy import save

from predictor import PredictorError, PredictorMismatchError, Structure, load_predictor
from predictor.features import split_by_time
from predictor.io import CARD, HEADER, WEIGHTS, read_card
from predictor.lstm import LSTMPredictor
from predictor.model import KINDS, predictor_class
from predictor.scorer import LSTMScorer, MLPScorer


@pytest.fixture(params=KINDS, scope="module")
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def fitted(kind, uneven_visits):
    visits = uneven_visits()
    predictor = predictor_class(kind)(visits.structure)
    predictor.fit(visits, split_by_time(visits))
    return predictor, visits


@pytest.fixture
def saved(fitted, tmp_path):
    """A fitted predictor, its visits, and the directory it was saved in."""
    predictor, visits = fitted
    return predictor, visits, predictor.save(tmp_path / "predictor", {"note": "a card"})


def test_a_loaded_predictor_scores_to_the_last_bit_as_the_saved_one(saved, kind):
    predictor, visits, directory = saved
    loaded = load_predictor(directory, visits.structure)
    np.testing.assert_array_equal(loaded.predict(visits), predictor.predict(visits))
    np.testing.assert_array_equal(loaded.scorer().scores(), predictor.scorer().scores())
    assert isinstance(loaded.scorer(), {"lstm": LSTMScorer, "sklearn": MLPScorer}[kind])
    assert type(predictor).load(directory).arrays.keys() == predictor.arrays.keys()
    assert read_card(directory) == {"note": "a card"}
    assert sorted(p.name for p in directory.iterdir()) == sorted([CARD, HEADER, WEIGHTS])


def test_saving_again_replaces_the_files_and_drops_a_stale_card(saved):
    predictor, visits, directory = saved
    predictor.save(directory)
    assert load_predictor(directory).structure == visits.structure
    with pytest.raises(PredictorError, match="cannot be read"):
        read_card(directory)


def test_another_structure_is_refused_with_expected_got_and_advice(saved):
    _, _, directory = saved
    with pytest.raises(PredictorMismatchError) as caught:
        load_predictor(directory, Structure.regular(4, 32))
    message = str(caught.value)
    assert "made for a model with 3 sets of 3 to 8 experts" in message
    assert "expected 4 sets of 32 experts" in message
    assert "odc predictor train" in message


def test_loading_as_another_kind_is_refused(saved, kind):
    _, _, directory = saved
    other = predictor_class(next(k for k in KINDS if k != kind))
    with pytest.raises(PredictorError, match=f"of kind '{kind}'"):
        other.load(directory)


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(PredictorError, match=r"nowhere holds no predictor\.json"):
        load_predictor(tmp_path / "nowhere")


def test_a_folder_of_pickles_is_refused_and_not_read(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was read",))

    (tmp_path / "model.pkl").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(PredictorError, match=r"model\.pkl.*never read"):
        load_predictor(tmp_path)


def test_a_pickle_in_place_of_the_weights_is_refused(saved):
    _, _, directory = saved
    (directory / WEIGHTS).write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(PredictorError, match="pickle or an archive"):
        load_predictor(directory)


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "empty"])
def test_damaged_weights_are_refused(saved, damage):
    _, _, directory = saved
    weights = directory / WEIGHTS
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "missing":
        weights.unlink()
    else:
        cut = {"cut": bytes(content[:-9]), "flipped": bytes(content), "empty": b""}
        weights.write_bytes(cut[damage])
    with pytest.raises(PredictorError, match="train the predictor again"):
        load_predictor(directory)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "odc-predictor/9"},
        {"kind": "forest"},
        {"structure": [[]]},
        {"structure": "layers"},
        {"settings": {"depth": 3}},
        {"weights_sha256": None},
    ],
)
def test_a_damaged_header_is_refused(saved, change):
    _, _, directory = saved
    header = json.loads((directory / HEADER).read_text())
    (directory / HEADER).write_text(json.dumps({**header, **change}))
    with pytest.raises(PredictorError, match=HEADER.replace(".", r"\.")):
        load_predictor(directory)


def test_a_header_that_is_not_json_is_refused(saved):
    _, _, directory = saved
    (directory / HEADER).write_text("{")
    with pytest.raises(PredictorError, match="cannot be read as JSON"):
        load_predictor(directory)


@pytest.mark.parametrize("content", [b"", b'{"note": "a c', b"[]", b"\xff\xfe{}"])
def test_a_damaged_card_is_refused(saved, content):
    _, _, directory = saved
    (directory / CARD).write_bytes(content)
    with pytest.raises(PredictorError, match=r"card\.json .*train the predictor again"):
        load_predictor(directory)
    (directory / CARD).unlink()  # one that was never written is no damage
    load_predictor(directory)


def rewrite(directory, arrays):
    """Puts other weights into a directory, with the right digest."""
    import hashlib

    content = save(arrays)
    header = json.loads((directory / HEADER).read_text())
    header["weights_sha256"] = hashlib.sha256(content).hexdigest()
    (directory / WEIGHTS).write_bytes(content)
    (directory / HEADER).write_text(json.dumps(header))


def test_weights_of_another_shape_are_refused(saved):
    predictor, _, directory = saved
    arrays = {**predictor.arrays, "start_seen": np.zeros(7, np.float32)}
    rewrite(directory, arrays)
    with pytest.raises(PredictorError, match="expected arrays"):
        load_predictor(directory)


def test_weights_that_are_not_finite_are_refused(saved):
    predictor, _, directory = saved
    seen = np.full_like(predictor.arrays["start_seen"], np.nan)
    rewrite(directory, {**predictor.arrays, "start_seen": seen})
    with pytest.raises(PredictorError, match="not finite in"):
        load_predictor(directory)


def test_importing_the_package_imports_neither_torch_nor_sklearn():
    import subprocess
    import sys

    code = (
        "import sys, predictor; from predictor import load_predictor, PredictorError; "
        "assert not {'torch', 'sklearn'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_exported_name_exists():
    import predictor

    for name in predictor.__all__:
        assert getattr(predictor, name) is not None
    with pytest.raises(AttributeError):
        _ = predictor.nothing
    assert predictor.LSTMPredictor is LSTMPredictor
