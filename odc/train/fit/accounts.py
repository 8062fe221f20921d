"""What a step needs, account by account: device, host, disk.

Activations follow from the own Transformer's operations: what each saves for backward, per token
(`saved_elements`); other decoders of the same make (grouped-query attention, gated MLP) save the
same. What autograd holds only for a moment (gradients of a layer's intermediate values, the
logits' gradient) is counted where the two meet at their largest.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from odc.errors import BudgetError
from odc.memory.frames import FRAME_BYTES
from odc.memory.home_plan import HomeOptions, HomePlan, plan_home
from odc.memory.machine import Folder, Machine
from odc.memory.preflight import check
from odc.sizes import format_bytes
from odc.train.fit.choice import Choice
from odc.train.fit.groups import Paged, largest_gradient_bytes
from odc.train.fit.model import ModelShape

_MARGIN = 0.02  # of total_mem, which the runtime leaves free (odc/memory/ledger.py)
_LOSS_ITEM = 4  # the loss is computed in float32
_INDEX_ITEM = 8
LIBRARY_BYTES = 18 << 20
MOST_KEPT_BYTES = 64 << 20
CONTEXT_BYTES = 512 << 20  # that a driver takes of a card


@dataclass(frozen=True)
class Rest:
    """What the device holds beside pages, at the worst moment of a step; bytes.

    Attributes:
        activations: What layers save for backward.
        loss: Logits, their softmax and their gradient.
        gradients: The largest gradient on its way into its page.
        transients: Gradients of intermediate values in one layer; with checkpointing, what that
            layer saves while it is recomputed.
        libraries: What torch and the interpreter take at the first step and keep.
    """

    activations: int
    loss: int
    gradients: int
    transients: int
    libraries: int = LIBRARY_BYTES

    @property
    def total(self) -> int:
        """The peak: the loss and the last layer's backward are never at their largest together."""
        return self._live + self.libraries + self.allocator

    @property
    def allocator(self) -> int:
        """As measured: a fifth of what comes and goes, up to what the C library trims."""
        return min(self._live // 5, MOST_KEPT_BYTES)

    @property
    def _live(self) -> int:
        return self.activations + self.gradients + max(self.loss, self.transients)


def saved_elements(model: ModelShape) -> float:
    """What a layer saves for each token, in elements of the compute's dtype."""
    queries, keys = model.heads * model.head_size, model.kv_heads * model.head_size
    # Both norms: input, normalized, scaled, and one scale a token. Attention: q, k, v, its answer
    # twice (by head, and flat for the projection), one sum a head.
    around = 6 * model.hidden + 2 + 3 * queries + 2 * keys + model.heads
    if not model.num_experts:
        return around + (4 if model.gated else 2) * model.mlp_width
    rows = model.top_k
    inside = (4 if model.gated else 2) * model.expert_width * rows
    # The rows as the experts read them and as they answered; the router's probabilities.
    return around + inside + 2 * rows * model.hidden + model.num_experts + 2 * rows + 1


def index_bytes(model: ModelShape) -> int:
    """What a layer's routing saves for each token in whole numbers: ids, order and its inverse."""
    return 3 * model.top_k * _INDEX_ITEM if model.num_experts else 0


def layer_bytes(model: ModelShape, choice: Choice) -> int:
    """What a layer saves for a micro-batch."""
    each = saved_elements(model) * choice.item_bytes + index_bytes(model)
    return math.ceil(each * choice.tokens)


def input_bytes(model: ModelShape, choice: Choice) -> int:
    """A layer's input: all that checkpointing keeps of it."""
    return model.hidden * choice.item_bytes * choice.tokens


def _transient_bytes(model: ModelShape, choice: Choice) -> int:
    """Gradients of intermediate values at the widest place of a layer's backward."""
    width = model.mlp_width or model.expert_width * model.top_k
    wide = (3 if model.gated else 2) * width + 2 * model.hidden
    queries = 2 * model.heads * model.head_size + 2 * model.kv_heads * model.head_size
    elements = max(wide, queries + 2 * model.hidden)
    if model.num_experts:
        elements += 2 * model.top_k * model.hidden
    return elements * choice.item_bytes * choice.tokens


def _loss_bytes(model: ModelShape, choice: Choice) -> int:
    """Logits, log-softmax and gradient, of all tokens or of a chunk; the last norm's share."""
    tokens = min(choice.loss_chunk or choice.tokens, choice.tokens)
    copies = 3 * _LOSS_ITEM + (choice.item_bytes if choice.item_bytes < _LOSS_ITEM else 0)
    norm = 3 * model.hidden * choice.item_bytes * choice.tokens
    return copies * model.vocab * tokens + norm


def rest_of(paged: Paged) -> Rest:
    """The accounts beside pages."""
    model, choice = paged.model, paged.choice
    passes = choice.accumulate if choice.order == "layer_major" else 1
    layer, entry = layer_bytes(model, choice), input_bytes(model, choice)
    transients = _transient_bytes(model, choice)
    if choice.mode == "offload":
        # What two layers saved: of the one that computes, and of the one on its way.
        activations = min(2, model.num_layers) * layer
    elif choice.mode == "checkpoint" or choice.order == "layer_major":
        activations = model.num_layers * entry * passes
        transients += layer
    else:
        activations = model.num_layers * layer
    return Rest(
        activations=activations,
        loss=_loss_bytes(model, choice),
        gradients=largest_gradient_bytes(paged),
        transients=transients,
    )


def offloaded_bytes(paged: Paged) -> int:
    """What layers saved that lives in host memory between forward and backward."""
    if paged.choice.mode != "offload":
        return 0
    return paged.model.num_layers * layer_bytes(paged.model, paged.choice)


@dataclass(frozen=True)
class Target:
    """Where a model is to be trained; bytes.

    Attributes:
        device: Memory of the device.
        machine: Host memory and the folder of a disk home, found or told.
        base: What the process takes of host memory before a model is there.
        context: What the driver takes of the device.
        shared: Whether the device is host memory (a machine without an accelerator).
    """

    device: int
    machine: Machine
    base: int = 400 << 20
    context: int = 0
    shared: bool = False

    @property
    def usable(self) -> int:
        """What pages and the rest may have of the device."""
        return max(self.device - self.context, 0)


def told_machine(host: int, disk: int, base: int = 400 << 20) -> Machine:
    """A machine by two sizes: its host memory, and the free space of a folder."""
    folder = Folder(Path("(disk)"), disk, "ext4", True)
    return Machine(host, max(host - base, 0), folder=folder)


@dataclass(frozen=True)
class Accounts:
    """Where everything is, in bytes.

    Attributes:
        pages: Frames for pages on the device.
        least_pages: The smallest that can train the model.
        all_pages: What would keep everything resident.
        rest: Beside pages on the device.
        context: Of the driver, on the device.
        host, disk: By account.
        on_host: (num_pages,) bool; the other pages live on disk.
        problems: Why it cannot work; empty where it can.
        warnings: It can work, and may be slow or tight.
    """

    pages: int
    least_pages: int
    all_pages: int
    rest: Rest
    context: int
    host: dict[str, int]
    disk: dict[str, int]
    on_host: np.ndarray
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether it can work."""
        return not self.problems

    @property
    def device_peak(self) -> int:
        """The most that the device holds."""
        return self.pages + self.rest.total + self.context

    @property
    def resident(self) -> bool:
        """Whether nothing has to be paged."""
        return self.pages >= self.all_pages


def account(paged: Paged, target: Target) -> Accounts:
    """Fills the accounts of a choice on a machine; the home is planned and judged as in a run."""
    choice, rest = paged.choice, rest_of(paged)
    least, owner = paged.least
    room = _page_room(choice, target, rest, paged.all_bytes)
    problems = []
    if room < min(least, paged.all_bytes):
        problems.append(
            f"device: {format_bytes(max(room, 0))} are left for pages beside "
            f"{format_bytes(rest.total)} of activations and the rest; group "
            f"{owner.spec.name} needs {format_bytes(least)}"
        )
    pages = min(max(room, 0) // FRAME_BYTES * FRAME_BYTES, paged.all_bytes)
    plan = _plan_home(paged, target, pages, rest)
    warnings: list[str] = []
    try:
        warnings = check(target.machine, plan.needs, "memory.")
    except BudgetError as error:
        problems += str(error).splitlines()
    needs = plan.needs
    host = {
        "process": target.base,
        "pages at home": needs.host_bytes,
        "gradients at home": needs.spare_bytes if _come_home(choice) else 0,
        "offloaded activations": offloaded_bytes(paged),
        "the device": pages + rest.total if target.shared else 0,
    }
    return Accounts(
        pages=pages,
        least_pages=least,
        all_pages=paged.all_bytes,
        rest=rest,
        context=target.context,
        host={name: size for name, size in host.items() if size},
        disk={"pages at home": needs.disk_bytes} if needs.disk_bytes else {},
        on_host=plan.on_host,
        problems=tuple(problems),
        warnings=tuple(warnings),
    )


def has_room(paged: Paged, target: Target) -> bool:
    """Whether the device can hold the least that pages need beside the rest."""
    room = _page_room(paged.choice, target, rest_of(paged), paged.all_bytes)
    return room >= min(paged.least[0], paged.all_bytes)


def _come_home(choice: Choice) -> bool:
    """Whether gradients go home: to be updated there, or because they outlive their backward."""
    return (
        choice.where == "home"
        or choice.update == "step"
        or (choice.accumulate > 1 and choice.order == "micro_major")
    )


def _page_room(choice: Choice, target: Target, rest: Rest, everything: int) -> int:
    if choice.page_budget is not None:
        return choice.page_budget
    limit = target.usable if choice.total_mem is None else min(choice.total_mem, target.usable)
    if choice.total_mem is None and everything + rest.total <= limit:
        return everything
    return limit - rest.total - int(_MARGIN * limit)


def _plan_home(paged: Paged, target: Target, pages: int, rest: Rest) -> HomePlan:
    """The home as the runtime plans it; a card's frames and rest take no host memory."""
    choice = paged.choice
    beside = offloaded_bytes(paged) + (rest.total if target.shared else 0)
    return plan_home(
        paged.table,
        HomeOptions(choice.home, None, choice.host_mem, "memory."),
        target.machine,
        frame_bytes=pages if target.shared else 0,
        rest_bytes=beside,
        gradients_come_home=_come_home(choice),
    )


def require_fit(accounts: Accounts) -> None:
    """Raises what does not fit.

    Raises:
        BudgetError: With every problem, a line each.
    """
    if accounts.problems:
        raise BudgetError("\n".join(accounts.problems))
