"""`config.yaml`: read once, checked whole, written back resolved.

    config, notices = load_config("config.yaml", ["memory.page_budget=400MB"])
    config.communication.priority_buckets = [["attn.*proj"], ["mlp.*"]]
    config.freeze()
    dump_config(config, run_dir / "config.yaml")

Everything wrong with a file is told in one `ConfigError`: the path of the field, the value found,
what is allowed, and the nearest spelling. The resolved file holds every key and loads back equal.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from odc.errors import ConfigError
from odc.train.config_checks import nearest
from odc.train.config_memory import (
    ActivationsConfig,
    CommunicationConfig,
    MemoryConfig,
    ShardingConfig,
)
from odc.train.config_model import AdapterConfig, DataConfig, ModelConfig
from odc.train.config_section import Section
from odc.train.config_training import (
    AccumulationConfig,
    CheckpointConfig,
    OptimizerConfig,
    ProfilerConfig,
    TrainConfig,
)
from odc.train.files import atomic_path

_OVERRIDE = "command line"
_HEADER = "# The resolved configuration of this run: every key, as it held.\n"
_INACTIVE = "  # inactive: no effect yet"


@dataclass(frozen=True, kw_only=True)
class Config:
    """All sections. Their fields can be set, and are validated, until `freeze`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    accumulation: AccumulationConfig = field(default_factory=AccumulationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        self._resolve()

    def sections(self) -> dict[str, Section]:
        """Returns the sections by heading, in the order of the file."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def freeze(self) -> "Config":
        """Resolves and checks everything once more, then ends all changes; returns itself.

        Raises:
            ConfigError: Keys that were set since the load do not fit together.
        """
        self._resolve()
        problems = [text for section in self.sections().values() for text in section.problems()]
        if problems:
            raise ConfigError(*problems)
        for section in self.sections().values():
            section.freeze()
        return self

    def notices(self) -> list[str]:
        """Returns one line for each key that was set but has no effect yet."""
        found = []
        for heading, section in self.sections().items():
            for name, field_ in section.fields().items():
                value = getattr(section, name)
                if section.is_inactive(name) and value != field_.default:
                    shown = field_.metadata["check"].show(value)
                    found.append(f"{heading}.{name}: {shown} has no effect yet")
        return found

    def _resolve(self) -> None:
        for section in self.sections().values():
            if not section.is_frozen:
                section.resolve()


@dataclass(frozen=True)
class _Entry:
    """One key as somebody wrote it."""

    source: str
    path: str
    value: Any


def load_config(
    path: str | Path | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
) -> tuple[Config, list[str]]:
    """Reads a configuration; what the file does not name has its default.

    Args:
        path: A `config.yaml`; `None` takes all defaults. Keys stand in sections, or dotted
            (`memory.page_budget: 400MB`).
        overrides: What overrides the file: `["memory.page_budget=400MB"]`, values read as
            YAML, or `{"memory.page_budget": "400MB"}`.

    Returns:
        The configuration, still open to changes, and a notice for each key that was set but has
        no effect yet.

    Raises:
        ConfigError: With every problem of the file and the overrides.
    """
    source = "config" if path is None else str(path)
    problems: list[str] = []
    entries = [] if path is None else list(_file_entries(Path(path), source, problems))
    entries += _override_entries(overrides, problems)
    config = Config()
    spoiled = _apply(config, entries, problems)
    config._resolve()
    for heading, section in config.sections().items():
        # With a field still at its default, what does not fit may not be the user's doing.
        if heading not in spoiled:
            problems += [f"{source}: {problem}" for problem in section.problems()]
    if problems:
        raise ConfigError(*problems)
    return config, config.notices()


def dump_config(config: Config, path: str | Path) -> None:
    """Writes every key to `path` so that `load_config` gives an equal configuration."""
    lines = [_HEADER]
    for heading, section in config.sections().items():
        lines.append(f"{heading}:\n")
        for name, value in section.shown().items():
            mark = _INACTIVE if section.is_inactive(name) else ""
            lines.append(f"  {name}: {_flow(value)}{mark}\n")
    with atomic_path(Path(path)) as temporary:
        temporary.write_text("".join(lines), encoding="utf-8")


def list_keys() -> str:
    """Returns every key with its default, its meaning and what it may be, as a `config.yaml`."""
    lines = []
    for heading, section in Config().sections().items():
        doc = (section.__doc__ or "").splitlines()[0]
        lines.append(f"{heading}:  # {doc}")
        for name, field_ in section.fields().items():
            check, meaning = field_.metadata["check"], field_.metadata["meaning"]
            mark = "; inactive: no effect yet" if field_.metadata["inactive"] is True else ""
            default = f"{name}: {_flow(check.show(field_.default))}"
            lines.append(f"  {default:<32}  # {meaning} [{check.kind}]{mark}")
    return "\n".join(lines)


def _flow(value: Any) -> str:
    shown = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return shown.removesuffix("...\n").strip()


def _apply(config: Config, entries: list[_Entry], problems: list[str]) -> set[str]:
    """Sets the entries; returns the sections in which some entry was refused."""
    sections, spoiled = config.sections(), set()
    for entry in entries:
        heading, _, name = entry.path.partition(".")
        if heading not in sections or not name:
            problems.append(f"{entry.source}: {_unknown(entry.path, sections)}")
            continue
        try:
            setattr(sections[heading], name, entry.value)
        except ConfigError as error:
            spoiled.add(heading)
            known = name in sections[heading].fields()
            message = str(error) if known else _unknown(entry.path, sections)
            problems.append(f"{entry.source}: {message}")
    return spoiled


def _unknown(path: str, sections: Mapping[str, Section]) -> str:
    guess = _guess(path, sections)
    hint = f"; did you mean {guess}?" if guess else ""
    if path.partition(".")[0] in sections:
        return f"{path}: unknown key{hint}"
    return f"{path}: unknown section; allowed: {', '.join(sections)}{hint}"


def _guess(path: str, sections: Mapping[str, Section]) -> str | None:
    """The same key of another section, else the nearest of its own, else the nearest of all."""
    heading, _, name = path.partition(".")
    keys = {head: list(section.fields()) for head, section in sections.items()}
    known = {key: f"{head}.{key}" for head, names in keys.items() for key in names}
    if (name or heading) in known:
        return known[name or heading]
    near = nearest(name, keys.get(heading, []))
    if near is not None:
        return f"{heading}.{near}"
    return nearest(path, list(known.values()) if name else list(sections))


def _override_entries(
    overrides: Sequence[str] | Mapping[str, Any], problems: list[str]
) -> list[_Entry]:
    if isinstance(overrides, Mapping):
        return [_Entry(_OVERRIDE, key, value) for key, value in overrides.items()]
    entries = []
    for text in overrides:
        key, equals, raw = text.partition("=")
        if not equals or "." not in key:
            problems.append(f"{_OVERRIDE}: got {text!r}; allowed: SECTION.KEY=VALUE")
            continue
        try:
            entries.append(_Entry(_OVERRIDE, key.strip(), yaml.safe_load(raw)))
        except yaml.YAMLError as error:
            problems.append(f"{_OVERRIDE}: {key}: got {raw!r}, which is no YAML: {_where(error)}")
    return entries


def _file_entries(path: Path, source: str, problems: list[str]) -> Iterator[_Entry]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: is not UTF-8 text: {error.reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: is no YAML: {_where(error)}") from error
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{source}: got {type(tree).__name__}; allowed: sections with keys")
    seen: set[str] = set()
    for entry in _flatten(tree or {}, source, problems):
        if entry.path in seen:
            problems.append(f"{source}: {entry.path}: given twice")
        seen.add(entry.path)
        yield entry


def _flatten(tree: dict[Any, Any], source: str, problems: list[str]) -> Iterator[_Entry]:
    for heading, body in tree.items():
        if isinstance(body, dict):
            for name, value in body.items():
                yield _Entry(source, f"{heading}.{name}", value)
        elif "." in str(heading) or heading not in Config.__dataclass_fields__:
            yield _Entry(source, str(heading), body)
        elif body is not None:
            problems.append(f"{source}: {heading}: got {body!r}; allowed: keys with values")


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping; plain YAML would keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for index, (key, _) in enumerate(node.value):
            if key.value in keys[:index]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is given twice", key.start_mark
                )
        return super().construct_mapping(node, deep)


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    line = f"line {mark.line + 1}: " if mark is not None else ""
    return f"{line}{getattr(error, 'problem', None) or error}"
