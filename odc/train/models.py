"""A decoder-only transformer in plain PyTorch, dense or mixture-of-experts, by configuration.

Pre-norm blocks of grouped-query attention (rotary positions) and a gated MLP. The model knows
nothing of pages: it has no buffers and no cached tables, so that it can be built on the meta device
and given its storage group by group, and every weight is initialised from its own name, so that
the order of initialisation does not matter.

The experts of a mixture-of-experts layer may run in any order (`MoE.expert_order`). Results do not
depend on it, to the last bit: tokens are permuted to lie expert by expert, each expert reads and
writes its own slice, and the slots of one token are added in slot order.
"""

import hashlib
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odc.fsdp.chunked_loss import chunked_cross_entropy
from odc.train.config_model import ModelConfig
from odc.train.kv_cache import KVCache, LayerCache

Rope = tuple[Tensor, Tensor]
ExpertOrder = Callable[[list[int], Tensor], list[int]]

# Targets of this value are left out of the loss.
IGNORE_INDEX = -100


class FeedForward(nn.Module):
    """A gated (SwiGLU, three matrices) or plain (GELU, two matrices) MLP."""

    def __init__(self, hidden_size: int, width: int, kind: str) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden_size, width, bias=False)
        self.w3 = nn.Linear(hidden_size, width, bias=False) if kind == "swiglu" else None
        self.w2 = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, D), or (B, T, D), to the same shape."""
        if self.w3 is None:
            return self.w2(F.gelu(self.w1(x)))
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Expert(FeedForward):
    """One expert of a mixture-of-experts layer."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions; several query heads may share keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.kv_heads = config.num_heads, config.kv_heads
        self.head_size = config.head_size
        width, kv_width = self.num_heads * self.head_size, self.kv_heads * self.head_size
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: Rope, cache: LayerCache | None = None) -> Tensor:
        """Maps (B, T, D) to (B, T, D); with `cache` the T positions follow the cached ones."""
        q = rotate(self._heads(self.q_proj(x), self.num_heads), rope)
        k = rotate(self._heads(self.k_proj(x), self.kv_heads), rope)
        v = self._heads(self.v_proj(x), self.kv_heads)
        past = 0
        if cache is not None:
            past = cache.length
            k, v = cache.append(k, v)
        mask = None
        if past and q.size(2) > 1:
            shape = (q.size(2), k.size(2))
            mask = torch.ones(shape, dtype=torch.bool, device=x.device).tril(diagonal=past)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=not past, enable_gqa=self.num_heads != self.kv_heads
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, num_heads: int) -> Tensor:
        """(B, T, H * d) -> (B, H, T, d)."""
        return x.unflatten(2, (num_heads, self.head_size)).transpose(1, 2)


class MoE(nn.Module):
    """Sends each token to its `top_k` experts and adds their answers, weighted by the router.

    Attributes:
        experts: The experts, in order of their ids.
        expert_order: Called with the ascending ids of the experts that received tokens and the
            routing (N, k); returns the ids in the order to run. `None` runs them ascending.
            The order changes no bit of the result or of any gradient.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.num_experts is not None, "a dense layer has no MoE"
        self.top_k, self.normalize_gates = config.top_k, config.normalize_gates
        self.balance_coef, self.router_z_coef = config.balance_coef, config.router_z_coef
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            Expert(config.hidden_size, config.expert_width, config.mlp)
            for _ in range(config.num_experts)
        )
        self.expert_order: ExpertOrder | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Maps (B, T, D) to (B, T, D) and the layer's auxiliary loss, a scalar."""
        tokens = x.flatten(0, 1)
        routing, gates, auxiliary = self._route(tokens)
        return self._run(tokens, routing, gates).view_as(x), auxiliary

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(N, D) -> expert ids (N, k), gate weights (N, k), auxiliary loss; all in float32."""
        logits = F.linear(tokens.float(), self.router.weight.float())
        probs = logits.softmax(dim=-1)
        gates, routing = probs.topk(self.top_k, dim=-1)
        if self.normalize_gates:
            gates = gates / gates.sum(dim=-1, keepdim=True)
        num_experts = probs.size(1)
        share = torch.bincount(routing.flatten(), minlength=num_experts) / routing.numel()
        # num_experts x (share of tokens . mean probability): 1 when balanced (Switch Transformer).
        auxiliary = self.balance_coef * num_experts * (share * probs.mean(dim=0)).sum()
        if self.router_z_coef:
            auxiliary = auxiliary + self.router_z_coef * logits.logsumexp(dim=-1).square().mean()
        return routing, gates, auxiliary

    def _run(self, tokens: Tensor, routing: Tensor, gates: Tensor) -> Tensor:
        """Runs the experts on (N, D) tokens; every reduction has one fixed order."""
        num_tokens, dim = tokens.shape
        num_rows = num_tokens * self.top_k
        rows = tokens.unsqueeze(1).expand(num_tokens, self.top_k, dim).reshape(num_rows, dim)
        expert_of_row = routing.flatten()
        permutation = expert_of_row.argsort(stable=True)
        counts = torch.bincount(expert_of_row, minlength=len(self.experts)).tolist()
        slices = rows.index_select(0, permutation).split(counts)
        used = [expert for expert, count in enumerate(counts) if count]
        order = used if self.expert_order is None else self.expert_order(used, routing)
        answers = {expert: self.experts[expert](slices[expert]) for expert in order}
        permuted = torch.cat([answers[expert] for expert in used])
        answered = permuted.index_select(0, permutation.argsort())
        weighted = answered * gates.reshape(num_rows, 1).to(answered.dtype)
        slots = weighted.reshape(num_tokens, self.top_k, dim).unbind(dim=1)
        total = slots[0]
        for slot in slots[1:]:
            total = total + slot
        return total


class Block(nn.Module):
    """One decoder layer: attention, then an MLP or a mixture of experts, each added to `x`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp: nn.Module
        if config.num_experts is None:
            self.mlp = FeedForward(config.hidden_size, config.mlp_width, config.mlp)
        else:
            self.mlp = MoE(config)

    def forward(
        self, x: Tensor, rope: Rope, cache: LayerCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Maps (B, T, D) to (B, T, D) and the auxiliary loss (zero in a dense layer)."""
        x = x + self.attn(self.attn_norm(x), rope, cache)
        answer = self.mlp(self.mlp_norm(x))
        if isinstance(answer, tuple):
            return x + answer[0], answer[1]
        return x + answer, x.new_zeros(())


class Transformer(nn.Module):
    """The whole model: embedding, decoder layers, final norm, output head.

    Args:
        config: Shape of the model.
        vocab_size: Number of token ids.
        loss_chunk: Tokens whose logits exist at a time in the loss; `None`: all.
    """

    def __init__(
        self, config: ModelConfig, vocab_size: int, *, loss_chunk: int | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.loss_chunk = loss_chunk
        self.embed = nn.Embedding(vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden_size, vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Makes head and embedding one parameter where the configuration says so.

        To be called again after `to_empty`, which gives every module its own parameters.
        """
        if self.config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Returns logits, or the loss where targets are given.

        Args:
            idx: Token ids (B, T).
            targets: Ids to predict (B, T); positions of `IGNORE_INDEX` do not count.
            cache: Keys and values of earlier positions; the T new positions are appended.

        Returns:
            Logits (B, T, V), or a scalar: mean cross-entropy, plus the routers' auxiliary losses
            (their mean over layers) in training mode.
        """
        x, auxiliary, rope = self.begin(idx, 0 if cache is None else cache.length)
        for index, layer in enumerate(self.layers):
            x, layer_auxiliary = layer(x, rope, None if cache is None else cache.layers[index])
            auxiliary = auxiliary + layer_auxiliary
        return self.end(x, auxiliary, targets)

    def begin(self, idx: Tensor, past: int = 0) -> tuple[Tensor, Tensor, Rope]:
        """What the layers work on: (B, T, D), the sum of auxiliary losses, and the rotations."""
        rope = rope_tables(past, idx.size(1), self.config, idx.device)
        x = self.embed(idx)
        return x, x.new_zeros((), dtype=torch.float32), rope

    def end(self, x: Tensor, auxiliary: Tensor, targets: Tensor | None) -> Tensor:
        """Logits or the loss, from what the layers made."""
        x = self.norm(x)
        if targets is None:
            return self.head(x)
        loss = self._loss(x, targets)
        return loss + auxiliary / len(self.layers) if self.training else loss

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the head's answers to (B, T, D)."""
        if self.loss_chunk is not None:
            return chunked_cross_entropy(
                x, self.head, targets, chunk=self.loss_chunk, ignore_index=IGNORE_INDEX
            )
        logits = self.head(x)
        return F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE_INDEX
        )

    def as_chain(self) -> "TransformerChain":
        """Returns the model as a chain of blocks, as `odc.layer_major` takes it."""
        return TransformerChain(self)


class TransformerChain:
    """A `Transformer` as embedding, blocks and loss; a micro-batch is (inputs, targets)."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self.blocks = list(model.layers)

    def embed(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Rope]:
        """Returns what the layers work on."""
        return self._model.begin(batch[0])

    def block(self, index: int, state: tuple[Tensor, Tensor, Rope]) -> tuple[Tensor, Tensor, Rope]:
        """Runs a layer; the sum of auxiliary losses is part of the state."""
        x, auxiliary, rope = state
        x, more = self.blocks[index](x, rope)
        return x, auxiliary + more, rope

    def loss(self, state: tuple[Tensor, Tensor, Rope], batch: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the loss that the model returns for the batch."""
        return self._model.end(state[0], state[1], batch[1])


def rope_tables(start: int, length: int, config: ModelConfig, device: torch.device) -> Rope:
    """Returns cosine and sine (T, d / 2) for positions `start` to `start + length`."""
    half = config.head_size // 2
    powers = torch.arange(half, dtype=torch.float32, device=device) / half
    positions = torch.arange(start, start + length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, config.rope_theta**-powers)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Turns pairs (i, i + d/2) of (B, H, T, d) by their position's angle."""
    cos, sin = (table.to(x.dtype) for table in rope)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def init_weights(
    fqn: str, module: nn.Module, *, seed: int = 0, std: float = 0.02, num_layers: int = 1
) -> None:
    """Initialises the parameters that `module` itself owns, not those of its children.

    A parameter's values depend on its fqn, its shape, the seed and the kind of device only.

    Args:
        fqn: Name of `module` from the root of the model; empty for the root.
        module: Module whose parameters have storage.
        seed: Seed of the run.
        std: Standard deviation of matrices.
        num_layers: Depth; matrices that write to the residual stream get `std / sqrt(2 * depth)`.
    """
    for name, parameter in module.named_parameters(recurse=False):
        full_name = f"{fqn}.{name}" if fqn else name
        init_parameter(full_name, parameter, seed=seed, std=std, num_layers=num_layers)


@torch.no_grad()
def init_parameter(
    fqn: str, parameter: Tensor, *, seed: int = 0, std: float = 0.02, num_layers: int = 1
) -> None:
    """Initialises one parameter, as `init_weights` does."""
    if parameter.dim() < 2:
        parameter.fill_(1.0)
        return
    digest = hashlib.sha256(f"{seed}:{fqn}".encode()).digest()
    generator = torch.Generator(device=parameter.device)
    generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    writes_residual = fqn.endswith((".o_proj.weight", ".w2.weight"))
    scale = std / math.sqrt(2 * num_layers) if writes_residual else std
    parameter.normal_(0.0, scale, generator=generator)


def initializer(config: ModelConfig, seed: int) -> Callable[[str, nn.Module], None]:
    """Returns `init_weights` for this model, as `odc.paged(..., init=...)` takes it."""
    return partial(init_weights, seed=seed, std=config.init_std, num_layers=config.num_layers)


def build_model(
    config: ModelConfig,
    vocab_size: int,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    loss_chunk: int | None = None,
) -> Transformer:
    """Builds a model; on the meta device it has shapes only, elsewhere initialised weights.

    Args:
        config: Shape of the model.
        vocab_size: Number of token ids.
        seed: Seed of the weights.
        device: Where the parameters live.
        loss_chunk: Tokens whose logits exist at a time in the loss; `None`: all.
    """
    with torch.device("meta"):
        model = Transformer(config, vocab_size, loss_chunk=loss_chunk)
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    model.tie_weights()
    initialize = initializer(config, seed)
    for fqn, module in model.named_modules():
        if not (config.tie_embeddings and module is model.head):
            initialize(fqn, module)
    return model


def model_shapes(config: ModelConfig, vocab_size: int) -> dict[str, torch.Size]:
    """Returns the shape of every parameter by fqn, without allocating any."""
    model = build_model(config, vocab_size, device="meta")
    return {fqn: parameter.shape for fqn, parameter in model.named_parameters()}
