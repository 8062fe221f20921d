"""Claims about `config.yaml`: what is accepted, what is refused and in which words."""

import dataclasses

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from odc.errors import ConfigError, OdcError
from odc.train.config import Config, dump_config, list_keys, load_config
from odc.train.config_memory import MemoryConfig
from odc.train.config_training import OptimizerConfig


def write(tmp_path, text: str, name: str = "config.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def problems_of(*overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return caught.value.problems


FEATURES_YAML = """
sharding: {shard_granularity: element, planning_algorithm: optimal, dbuffer_size: 512MB}
communication: {priority_buckets: 3, overlap_factor: 0.7}
memory:
  total_mem: 40GB
  page_size: 256MB
  page_prefetch: 2
  prefetch_window: 4
  max_items: 150
  evict_strategy: cost_aware
  predictor: lstm
  predictor_path: predictors/mine
"""


def test_the_keys_of_the_feature_list_are_accepted_as_they_stand(tmp_path):
    config, notices = load_config(write(tmp_path, FEATURES_YAML))
    assert config.memory.total_mem == 40 * 2**30
    assert (config.memory.page_prefetch, config.memory.prefetch_window) == (2, 4)
    assert config.memory.max_items == 150
    assert config.sharding.dbuffer_size == 512 * 2**20
    assert notices == [
        "communication.overlap_factor: 0.7 has no effect yet",
    ]


def test_without_a_file_every_key_has_its_default():
    config, notices = load_config()
    assert config == Config() and notices == []
    memory = config.memory
    assert (memory.total_mem, memory.page_budget, memory.page_size) == (None, None, 256 << 20)
    assert (memory.home, memory.evict_strategy, memory.prefetch) == (
        "host",
        "cost_aware",
        "popularity",
    )
    assert memory.host_mem is None
    assert config.profiler.trace_interval == 100
    assert config.profiler.metrics == ("comm_vol", "mem_footprint")


def test_a_home_of_two_tiers_may_limit_its_host_memory():
    config, notices = load_config(None, ["memory.home=host+disk", "memory.host_mem=4GB"])
    assert (config.memory.home, config.memory.host_mem, notices) == ("host+disk", 4 << 30, [])
    assert load_config(None, ["memory.home=host+disk"])[0].memory.host_mem is None


@pytest.mark.parametrize("home", ["host", "disk"])
def test_host_memory_is_refused_where_nothing_is_limited_by_it(home):
    (problem,) = problems_of(f"memory.home={home}", "memory.host_mem=1GB")
    assert (
        f"memory.host_mem: got 1073741824 bytes with memory.home {home}; allowed: auto" in problem
    )


def test_a_misspelt_key_is_told_with_its_path_and_the_nearest_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "memory:\n  evict_stratgy: lru\n")
    with pytest.raises(ConfigError) as caught:
        load_config("config.yaml")
    assert str(caught.value) == (
        "config.yaml: memory.evict_stratgy: unknown key; did you mean memory.evict_strategy?"
    )


def test_a_wrong_value_is_told_with_what_was_got_allowed_and_near():
    (problem,) = problems_of("memory.evict_strategy=cost_awre")
    assert problem == (
        "command line: memory.evict_strategy: got 'cost_awre'; "
        "allowed: lru, mru, fifo, lfu, gdsf, cost_aware, belady, auto; did you mean cost_aware?"
    )


def test_all_problems_of_a_file_are_told_together(tmp_path):
    text = """
    memory: {page_budget: 4 parsecs, home: tape, total_mem: 1GB}
    train: {steps: 0, lr: 3}
    memroy: {home: disk}
    train.sede: 1
    optimizer: {update: backward, max_grad_norm: 1.0, betas: [0.9]}
    model: {num_heads: 3}
    seq_len: 12
    """
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), ["train.micro_batch=many", "steps"])
    told = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 11
    for part in (
        "memory.page_budget: '4 parsecs' is no size",
        "memory.home: got 'tape'; allowed: host, disk",
        "train.steps: got 0; allowed: a whole number, at least 1",
        "train.lr: unknown key; did you mean optimizer.lr?",
        f"memroy.home: unknown section; allowed: {', '.join(Config().sections())}; "
        "did you mean memory.home?",
        "train.sede: unknown key; did you mean train.seed?",
        "optimizer.betas: got [0.9]; allowed: a list of 2",
        "model.hidden_size: got 256 with model.num_heads 3",
        "seq_len: unknown section",
        "did you mean train.seq_len?",
        "command line: train.micro_batch: got 'many'",
        "command line: got 'steps'; allowed: SECTION.KEY=VALUE",
    ):
        assert part in told, part


def test_overrides_win_over_the_file_and_are_read_as_yaml(tmp_path):
    path = write(tmp_path, "memory.page_budget: 1GB\noptimizer: {lr: 3e-4}\n")
    config, _ = load_config(
        path, ["memory.page_budget=400MB", "optimizer.betas=[0.8, 0.9]", "memory.total_mem=null"]
    )
    assert config.memory.page_budget == 400 * 2**20
    assert config.optimizer.betas == (0.8, 0.9) and config.optimizer.lr == 3e-4
    same, _ = load_config(path, {"memory.page_budget": 400 * 2**20, "optimizer.betas": (0.8, 0.9)})
    assert same == config


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("memory: {home: disk, home: host}", "home is given twice"),
        ("memory: {home: disk}\nmemory.home: host", "memory.home: given twice"),
        ("memory: [1", "is no YAML: line "),
        ("- memory", "got list"),
        ("memory: 5", "memory: got 5; allowed: keys with values"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, part):
    with pytest.raises(ConfigError, match="config.yaml") as caught:
        load_config(write(tmp_path, text))
    assert part in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="absent.yaml: cannot be read: No such file"):
        load_config(tmp_path / "absent.yaml")


def test_naming_a_predictor_sets_prefetch_and_needs_its_folder():
    config, _ = load_config(None, ["memory.predictor=lstm", "memory.predictor_path=p"])
    assert config.memory.prefetch == "predictor"
    assert "memory.predictor_path: missing" in problems_of("memory.predictor=sklearn")[0]
    contradiction = problems_of(
        "memory.predictor=lstm", "memory.predictor_path=p", "memory.prefetch=replay"
    )
    assert contradiction[0].startswith("config: memory.prefetch: got 'replay' with memory.pred")
    assert "allowed: sklearn, lstm" in problems_of("memory.prefetch=predictor")[0]
    assert "name the predictor" in problems_of("memory.predictor_path=p")[0]
    config, _ = load_config(None, ["memory.prefetch=auto", "memory.predictor_path=p"])
    assert (config.memory.prefetch, config.memory.predictor) == ("auto", "none")


def test_the_oracle_needs_a_recorded_future():
    assert "memory.oracle_trace: missing" in problems_of("memory.prefetch=oracle")[0]
    assert "memory.oracle_trace: missing" in problems_of("memory.evict_strategy=belady")[0]
    assert "which nothing reads" in problems_of("memory.oracle_trace=runs/a")[0]
    load_config(
        None,
        [
            "memory.prefetch=oracle",
            "memory.evict_strategy=belady",
            "memory.oracle_trace=runs/a",
        ],
    )


def test_pages_get_no_more_than_the_whole():
    (problem,) = problems_of("memory.total_mem=1GB", "memory.page_budget=2GB")
    assert "at most memory.total_mem" in problem


def test_updates_run_in_backward_unless_the_gradient_norm_is_clipped():
    assert load_config()[0].optimizer.update == "backward"
    clipped, _ = load_config(None, ["optimizer.max_grad_norm=1"])
    assert clipped.optimizer.update == "step"
    (problem,) = problems_of("optimizer.max_grad_norm=1", "optimizer.update=backward")
    assert "optimizer.update: got 'backward'" in problem and "allowed: step" in problem


def test_values_that_do_not_exist_yet_say_so():
    (problem,) = problems_of("train.task=dpo")
    assert "train.task: got 'dpo' (not available yet); allowed: pretrain" in problem
    _, notices = load_config(None, ["communication.overlap_factor=0.5"])
    assert notices == ["communication.overlap_factor: 0.5 has no effect yet"]


def test_threads_leave_one_core_to_the_transfers(monkeypatch):
    train = Config().train
    for cores, threads in ((1, 1), (2, 1), (16, 15)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert train.num_threads == threads
    train.threads = 4
    assert train.num_threads == 4


def test_fields_set_from_python_are_validated_until_the_run_starts():
    config, _ = load_config()
    config.communication.priority_buckets = [["attn.*proj"], ["mlp.*"], ["norm.*"]]
    assert config.communication.priority_buckets == (("attn.*proj",), ("mlp.*",), ("norm.*",))
    assert config.notices()[0].startswith("communication.priority_buckets: [['attn.*proj']")
    with pytest.raises(ConfigError, match="is no regular expression: unterminated"):
        config.communication.priority_buckets = [["attn.*[proj"]]
    with pytest.raises(ConfigError, match="did you mean memory.page_budget?"):
        config.memory.page_buget = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.memory = MemoryConfig()
    assert config.freeze() is config
    with pytest.raises(ConfigError, match="memory.page_budget: set after the run started"):
        config.memory.page_budget = "400MB"


def test_freezing_resolves_and_checks_what_was_set_since_the_load():
    config, _ = load_config()
    config.optimizer.max_grad_norm = 1.0
    assert config.freeze().optimizer.update == "step"
    wrong, _ = load_config()
    wrong.memory.predictor = "lstm"
    with pytest.raises(ConfigError, match="memory.predictor_path: missing"):
        wrong.freeze()
    wrong.memory.predictor_path = "p"
    assert wrong.freeze().memory.prefetch == "predictor"


def test_sections_made_in_python_mean_the_same_as_a_file(tmp_path):
    made = Config(
        memory=MemoryConfig(page_budget="400MB", predictor="lstm", predictor_path="p"),
        optimizer=OptimizerConfig(max_grad_norm=1.0),
    )
    text = """
    memory: {page_budget: 400MB, predictor: lstm, predictor_path: p}
    optimizer: {max_grad_norm: 1.0}
    """
    assert made == load_config(write(tmp_path, text))[0]


def test_the_resolved_file_holds_every_key_loads_back_equal_and_is_silent(tmp_path):
    config, notices = load_config(write(tmp_path, FEATURES_YAML, "in.yaml"))
    config.communication.priority_buckets = [["attn.*proj", "a: #b"], ["mlp.*"]]
    dump_config(config.freeze(), tmp_path / "out.yaml")
    again, _ = load_config(tmp_path / "out.yaml")
    assert again == config
    tree = yaml.safe_load((tmp_path / "out.yaml").read_text())
    for heading, section in config.sections().items():
        assert list(tree[heading]) == [f.name for f in dataclasses.fields(section)]
    dump_config(load_config()[0], tmp_path / "default.yaml")
    assert load_config(tmp_path / "default.yaml")[1] == []


def test_the_list_of_keys_is_a_configuration_of_all_defaults_with_meanings(tmp_path):
    text = list_keys()
    path = tmp_path / "config.yaml"
    path.write_text(text)
    for section in load_config(path)[0].sections().values():
        assert all(getattr(section, k) == f.default for k, f in section.fields().items())
    lines = text.splitlines()
    keys = [name for section in Config().sections().values() for name in section.fields()]
    assert [line.split(":")[0].strip() for line in lines if line.startswith("  ")] == keys
    assert all("  # " in line for line in lines)


def test_keys_without_effect_are_marked_in_the_resolved_file(tmp_path):
    config, _ = load_config(None, ["optimizer.where=auto"])
    dump_config(config, tmp_path / "config.yaml")
    marked = [
        line.split(":")[0].strip()
        for line in (tmp_path / "config.yaml").read_text().splitlines()
        if line.endswith("# inactive: no effect yet")
    ]
    assert marked == ["priority_buckets", "overlap_factor"]


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.lists(st.one_of(st.integers(), st.text(max_size=4)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
paths = st.sampled_from(
    [f"{h}.{f.name}" for h, s in Config().sections().items() for f in dataclasses.fields(s)]
)


@settings(max_examples=150, deadline=None)
@given(paths, scalars)
def test_any_value_is_accepted_and_kept_or_refused_with_its_path(path, value):
    try:
        config, _ = load_config(None, {path: value})
    except OdcError as error:
        assert path.split(".")[0] in str(error)
        return
    heading, name = path.split(".")
    kept = config.sections()[heading].shown()[name]
    assert load_config(None, {**{path: kept}})[0] == config
