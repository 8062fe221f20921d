"""LoRA: small matrices beside frozen linear layers, the only thing that is trained.

    odc.lora(model, rank=8, alpha=16, targets=("q_proj", "v_proj"))
    model, opt = odc.paged(model, torch.optim.AdamW, total_mem="2GB")

A linear layer keeps its name and its weight (`q_proj.weight`), so that whatever fills a model by
name fills the base as well, and gets `q_proj.lora_A.NAME` and `q_proj.lora_B.NAME` below it. The
arithmetic is peft's: y = W x + B A dropout(x) * alpha / rank. Several adapters lie on one base; one
of them is active, or none.

Source: Hu et al., LoRA, arXiv 2106.09685; initial values as peft has them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from odc.errors import ConfigError
from odc.fsdp.safetensors_file import Entry, read_span

M = TypeVar("M", bound=nn.Module)
ALL_LINEAR = "all-linear"
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """One adapter.

    Attributes:
        rank: columns of B and rows of A.
        alpha: the product is scaled by alpha / rank.
        dropout: chance that an element of the input is left out while training.
        targets: names of the linear layers, or ends of names; one string is a pattern for the whole
            name.
    """

    rank: int = 8
    alpha: float = 16
    dropout: float = 0.0
    targets: tuple[str, ...] | str = ("q_proj", "v_proj")

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank

    def shapes(self, layer: nn.Linear) -> dict[str, tuple[int, int]]:
        """Shapes of the two matrices beside a layer."""
        return {
            "lora_A": (self.rank, layer.in_features),
            "lora_B": (layer.out_features, self.rank),
        }

    def matches(self, fqn: str) -> bool:
        """Whether a layer of this name is a target."""
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, fqn) is not None
        return any(fqn == t or fqn.endswith(f".{t}") for t in self.targets)


class Factor(nn.Linear):
    """One matrix of an adapter: A, which begins random, or B, which begins as zeros.

    Attributes:
        adapter: the adapter's name.
        entry: where its first values lie in a file; None for those of a new adapter.
    """

    def __init__(self, shape: tuple[int, int], like: Tensor, adapter: str, seed: str) -> None:
        dtype = torch.float32 if like.dtype in _HALVES or not like.is_floating_point() else None
        options: Any = {"device": like.device, "dtype": dtype or like.dtype}
        super().__init__(shape[1], shape[0], bias=False, **options)
        self.adapter = adapter
        self.entry: Entry | None = None
        self._seed = seed

    def reset_parameters(self) -> None:
        """Values come with ``fill``."""

    @torch.no_grad()
    def fill(self) -> None:
        """Give the matrix its first values; they depend on its name, its shape and the seed."""
        weight = self.weight.detach()
        if self.entry is not None:
            read_span(self.entry, 0, weight.view(-1))
        elif ".lora_B." in self._seed:
            weight.zero_()
        else:
            digest = hashlib.sha256(self._seed.encode()).digest()
            generator = torch.Generator(weight.device)
            generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)


class LoraLinear(nn.Linear):
    """A frozen linear layer with adapters. Made of an ``nn.Linear`` by ``lora``, in place.

    Attributes:
        lora_A, lora_B, lora_dropout: by name of the adapter.
        scaling: alpha / rank of each.
        active: the adapter that is added, None for the base alone.
    """

    lora_A: nn.ModuleDict
    lora_B: nn.ModuleDict
    lora_dropout: nn.ModuleDict
    scaling: dict[str, float]
    active: str | None

    def add(self, name: str, config: LoraConfig, fqn: str, seed: int) -> None:
        """Lay an adapter beside the weight."""
        for kind, shape in config.shapes(self).items():
            key = f"{seed}:{fqn}.{kind}.{name}"
            getattr(self, kind)[name] = factor = Factor(shape, self.weight, name, key)
            if not factor.weight.is_meta:
                factor.fill()
        self.lora_dropout[name] = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.scaling[name] = config.scaling

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out), in the dtype of the base's result."""
        result = super().forward(input)
        name = self.active
        if name is None or name not in self.scaling:
            return result
        a, b = self.lora_A[name], self.lora_B[name]
        assert isinstance(a, Factor)
        x = self.lora_dropout[name](input.to(a.weight.dtype))
        return (result + b(a(x)) * self.scaling[name]).to(result.dtype)


@dataclass(slots=True)
class Adapters:
    """What a model knows of its adapters."""

    configs: dict[str, LoraConfig]
    active: str | None


def lora(
    model: M,
    rank: int = 8,
    alpha: float = 16,
    dropout: float = 0.0,
    targets: Iterable[str] | str = ("q_proj", "v_proj"),
    names: Iterable[str] = ("default",),
    *,
    seed: int = 0,
) -> M:
    """Freeze a model and lay adapters beside its linear layers, in place; before ``odc.paged``.

    Called again with other names it adds adapters. The first adapter is the active one;
    ``set_adapter`` changes that.

    Args:
        model: built already, or on the meta device. Its own parameters are frozen.
        rank: of the two matrices.
        alpha: their product is scaled by ``alpha / rank``.
        dropout: chance that an element of the input is left out while training.
        targets: names of linear layers, or ends of names (``"q_proj"`` is that of every layer); one
            string is a pattern for the whole name, ``"all-linear"`` means all linear layers in
            lists of layers.
        names: of the adapters, which are alike but for their initial values.
        seed: of the initial values.

    Returns:
        The model.

    Raises:
        ConfigError: a value is out of its range, no layer matches, or one that does cannot be
            adapted; says what to change.
    """
    config = _checked(model, rank, alpha, dropout, targets)
    for name in [names] if isinstance(names, str) else list(names):
        add_adapter(model, name, config, seed=seed)
    return model


def add_adapter(model: nn.Module, name: str, config: LoraConfig, *, seed: int = 0) -> None:
    """Lay one adapter beside the layers that its configuration names, as ``lora`` does."""
    if hasattr(model, "_odc_runtime"):
        raise ConfigError(
            f"adapter {name!r}: the model lies in pages already; add all adapters before odc.paged"
        )
    known = getattr(model, "_odc_adapters", None)
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", name) or hasattr(nn.ModuleDict, name):
        raise ConfigError(f"names: got {name!r}; expected letters, digits, _ and - ('default')")
    if known is not None and name in known.configs:
        raise ConfigError(f"names: the model has an adapter {name!r} already; use another name")
    found = target_layers(model, config)
    adapters = known or Adapters({}, name)
    model._odc_adapters = adapters  # type: ignore[assignment]
    if known is None:
        model.requires_grad_(False)
    for fqn, layer in found:
        _become(layer, adapters.active).add(name, config, fqn, seed)
    adapters.configs[name] = config


def _become(layer: nn.Linear, active: str | None) -> LoraLinear:
    if not isinstance(layer, LoraLinear):
        layer.__class__ = LoraLinear
        assert isinstance(layer, LoraLinear)
        layer.lora_A, layer.lora_B = nn.ModuleDict(), nn.ModuleDict()
        layer.lora_dropout = nn.ModuleDict()
        layer.scaling, layer.active = {}, active
    return layer


def adapters_of(model: nn.Module) -> Adapters:
    """What a model knows of its adapters.

    Raises:
        ConfigError: it has none.
    """
    found = getattr(model, "_odc_adapters", None)
    if found is None:
        raise ConfigError(
            "the model has no adapter; call odc.lora(model, ...) first "
            "(a model of peft has a save_pretrained of its own)"
        )
    return found  # type: ignore[no-any-return]


def set_adapter(model: nn.Module, name: str | None) -> None:
    """Make another adapter the active one: the one that runs, gets gradients and is trained.

    The others stay at home. To be called between steps.

    Args:
        model: changed by ``lora``, in pages or not.
        name: of the adapter; None for the base alone.

    Raises:
        ConfigError: there is no such adapter.
        RuntimeError: a forward or backward of a paged model runs.
    """
    adapters = adapters_of(model)
    if name is not None and name not in adapters.configs:
        raise ConfigError(
            f"no adapter {name!r}; the model has {', '.join(map(repr, adapters.configs))}"
        )
    runtime: Any = getattr(model, "_odc_runtime", None)
    if runtime is not None:
        runtime.use_adapter(name)
    adapters.active = name
    for layer in lora_layers(model).values():
        layer.active = name


def lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers with adapters, by name."""
    return {fqn: m for fqn, m in model.named_modules() if isinstance(m, LoraLinear)}


def factors_of(model: nn.Module, name: str) -> Iterator[tuple[str, Factor]]:
    """(name of the layer and "lora_A" or "lora_B", matrix) of an adapter, in order of the model."""
    for fqn, layer in lora_layers(model).items():
        if name in layer.scaling:
            for kind in ("lora_A", "lora_B"):
                yield f"{fqn}.{kind}", getattr(layer, kind)[name]


# -- checks ----------------------------------------------------------------------------------------


def _checked(
    model: nn.Module, rank: int, alpha: float, dropout: float, targets: Iterable[str] | str
) -> LoraConfig:
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ConfigError(f"rank must be a whole number of at least 1, got {rank!r}")
    if not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ConfigError(f"alpha must be a number above 0, got {alpha!r}")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ConfigError(f"dropout must be at least 0 and below 1, got {dropout!r}")
    if targets == ALL_LINEAR:
        targets = all_linear(model)
    chosen = targets if isinstance(targets, str) else tuple(targets)
    if isinstance(chosen, str):
        try:
            re.compile(chosen)
        except re.error as error:
            raise ConfigError(f"targets: {chosen!r} is no pattern: {error}") from error
    return LoraConfig(rank, alpha, float(dropout), chosen)


def all_linear(model: nn.Module) -> tuple[str, ...]:
    """Last names of the linear layers inside lists of layers, without those that nobody calls."""
    names = {
        fqn.rpartition(".")[2]
        for fqn, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not isinstance(module, Factor)
        and re.search(r"\.\d+\.", f".{fqn}.")
        and not _why_not(model, fqn, module)
    }
    return tuple(sorted(names))


def target_layers(model: nn.Module, config: LoraConfig) -> list[tuple[str, nn.Linear]]:
    """The layers that an adapter goes beside, by name.

    Raises:
        ConfigError: a target matches no layer, or one that cannot have an adapter.
    """
    modules = [(n, m) for n, m in model.named_modules() if not isinstance(m, Factor)]
    found = [(n, m) for n, m in modules if n and config.matches(n)]
    missed = [
        target
        for target in ([] if isinstance(config.targets, str) else config.targets)
        if not any(LoraConfig(targets=(target,)).matches(n) for n, _ in found)
    ]
    if not found or missed:
        has = sorted({n.rpartition(".")[2] for n, m in modules if isinstance(m, nn.Linear)})
        what = ", ".join(missed) if missed else repr(config.targets)
        raise ConfigError(
            f"targets: no layer of the model is named {what}; its linear layers are named "
            f"{', '.join(has) or '(none)'}"
        )
    layers: list[tuple[str, nn.Linear]] = []
    for fqn, module in found:
        why = _why_not(model, fqn, module)
        if why:
            raise ConfigError(f"targets: {fqn} {why}; name other layers")
        assert isinstance(module, nn.Linear)
        layers.append((fqn, module))
    return layers


def _why_not(model: nn.Module, fqn: str, module: nn.Module) -> str:
    """Why a module cannot have an adapter; empty where it can."""
    if type(module) not in (nn.Linear, LoraLinear):
        return f"is a {type(module).__name__}, and adapters go beside nn.Linear"
    owner, _, _ = fqn.rpartition(".")
    if hasattr(model.get_submodule(owner), "expert_order"):
        return "is a router, whose weight is read without a call, so that nothing could be added"
    return ""
