"""The answer in words, and its settings as a `config.yaml`."""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from odc.sizes import format_bytes
from odc.train.fit.answer import Answer, device_accounts
from odc.train.fit.choice import as_tree, overrides
from odc.train.fit.predict import Prediction
from odc.train.fit.rates import Rates
from odc.train.fit.search import MOST_SEQUENCES
from odc.train.fit.verify import Measured


def format_answer(answer: Answer, yaml_text: str | None = None) -> str:
    """Returns the report as text."""
    model = answer.model
    active = (
        f", {count_in_words(model.active_numel)} of them work on a token"
        if model.num_experts
        else ""
    )
    lines = [f"{model.name}: {count_in_words(model.numel)} parameters{active}", answer.line, ""]
    if answer.accounts is not None:
        lines += _accounts(answer)
    if answer.prediction is not None:
        lines += ["", *_speed(answer.prediction), ""]
        most = answer.largest_micro_batch
        least = "at least " if most >= MOST_SEQUENCES else ""
        lines.append(f"largest micro-batch with these settings: {least}{most}")
    lines += [f"what helps: {help_}" for help_ in answer.helps]
    lines += ["", *_rates(answer.rates)]
    if answer.accounts is not None:
        lines += [f"note: {warning}" for warning in answer.accounts.warnings]
    if yaml_text is not None and answer.fits:
        lines += ["", "config.yaml:", "", yaml_text.rstrip()]
    return "\n".join(lines)


def count_in_words(numel: int) -> str:
    """A number of parameters, in billions or millions."""
    return f"{numel / 1e9:.3f} B" if numel >= 100e6 else f"{numel / 1e6:.3g} M"


def _accounts(answer: Answer) -> Iterator[str]:
    accounts = answer.accounts
    assert accounts is not None
    share = accounts.pages / max(accounts.all_pages, 1)
    yield (
        f"device {format_bytes(answer.target.device)}: peak {format_bytes(accounts.device_peak)}, "
        f"{share:.0%} of all pages resident; pages need {format_bytes(accounts.least_pages)} at "
        "least"
    )
    yield from _table(device_accounts(accounts))
    yield "  (of loss and transients only the larger counts: they do not meet)"
    machine = answer.target.machine
    yield f"host {format_bytes(machine.total_bytes)}: {format_bytes(sum(accounts.host.values()))}"
    yield from _table(accounts.host)
    if accounts.disk:
        free = machine.folder.free_bytes if machine.folder else 0
        yield f"disk {format_bytes(free)}: {format_bytes(sum(accounts.disk.values()))}"
        yield from _table(accounts.disk)


def _table(sizes: Mapping[str, int]) -> Iterator[str]:
    for name, size in sizes.items():
        yield f"  {name:<24}{format_bytes(size):>12}"


def _speed(made: Prediction) -> Iterator[str]:
    low, high = made.range_tokens_s
    yield (
        f"speed: {made.tokens_s:,.4g} tokens/s expected ({low:,.4g} to {high:,.4g}, an "
        f"assumed {made.spread:.0%} either way), "
        f"{made.bound_tokens_s:,.4g} at most by any schedule"
    )
    yield (
        f"a step of {made.tokens:,} tokens: {made.step_s:.4g} s, compute {made.compute_s:.4g} s, "
        f"bound {made.bound_s:.4g} s ({made.limit} limits); {format_bytes(made.bytes_in)} in, "
        f"{format_bytes(made.bytes_out)} out"
    )


def _rates(rates: Rates) -> Iterator[str]:
    sources = rates.sources
    if rates.flops is not None:
        yield f"compute: {rates.flops / 1e12:.4g} Tflop/s ({sources.get('compute', 'told')})"
    else:
        yield f"compute: {sources.get('compute', '')}"
    yield f"link: {rates.host.bandwidth_in / 1e9:.3g} GB/s ({sources.get('link', 'told')})"
    yield f"disk: {rates.disk.bandwidth_in / 1e9:.3g} GB/s ({sources.get('disk', 'told')})"
    yield f"update: {1 / rates.update_s / 1e9:.3g} G parameters/s ({sources.get('update', '')})"


def settings_yaml(answer: Answer) -> str:
    """A complete `config.yaml` for the settings that were found."""
    assert answer.choice is not None, "something fits"
    keys: dict[str, Any] = {**_model_keys(answer), **overrides(answer.choice)}
    return yaml.safe_dump(as_tree(keys), sort_keys=False, default_flow_style=None, width=100)


def _model_keys(answer: Answer) -> dict[str, Any]:
    model = answer.model
    if model.config is None:
        return {} if model.folder is None else {"model.path": model.folder}
    keys = {
        f"model.{name}": value
        for name, value in model.config.shown().items()
        if value != type(model.config)().shown()[name]
    }
    return keys | {"data.vocab_size": model.vocab}


def verified(answer: Answer, measured: Measured) -> dict[str, Any]:
    """Predicted against measured: the device's peak, the process's, tokens a second."""
    assert answer.accounts is not None and answer.prediction is not None, "it fits"
    accounts, made = answer.accounts, answer.prediction
    pairs = {
        "device_peak": (accounts.device_peak, measured.device_peak),
        "process_peak": (sum(accounts.host.values()), measured.process_peak),
        "tokens_s": (made.tokens_s, measured.tokens_s),
        "bytes_in": (made.bytes_in, measured.bytes_in),
        "bytes_out": (made.bytes_out, measured.bytes_out),
    }
    return {
        name: {
            "predicted": predicted,
            "measured": found,
            "deviation": predicted / found - 1 if found else None,
        }
        for name, (predicted, found) in pairs.items()
    }


def format_verified(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The comparison as a table."""
    yield f"{'':<16}{'predicted':>14}{'measured':>14}{'deviation':>11}"
    for name, row in found.items():
        shown = [
            f"{row[key]:,.4g}" if name == "tokens_s" else format_bytes(row[key])
            for key in ("predicted", "measured")
        ]
        deviation = "-" if row["deviation"] is None else f"{row['deviation']:+.1%}"
        yield f"{name.replace('_', ' '):<16}{shown[0]:>14}{shown[1]:>14}{deviation:>11}"
