"""Claims about the transformer: its mathematics, its experts, its initialisation."""

import math

import pytest
import torch
import torch.nn.functional as F

from odc.fsdp.activations import checkpoint_layers
from odc.train.config_model import ModelConfig
from odc.train.models import (
    FeedForward,
    MoE,
    build_model,
    init_weights,
    initializer,
    model_shapes,
    rope_tables,
    rotate,
)

VOCAB = 97


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def config(**changes) -> ModelConfig:
    shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "mlp_size": 48}
    return ModelConfig(**{**shape, **changes})


def moe_config(**changes) -> ModelConfig:
    return config(num_experts=6, top_k=2, expert_size=16, **changes)


def batch(seed: int = 0, size: int = 3, length: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(VOCAB, (size, length + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def loss_and_grads(model) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = model(*batch())
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def assert_same_bits(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


SHAPES = [
    config(),
    config(num_kv_heads=2),
    config(mlp="gelu", tie_embeddings=True),
    moe_config(),
    moe_config(mlp="gelu", router_z_coef=0.01, normalize_gates=False, num_kv_heads=1),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_a_finite_loss_come_out_and_every_used_parameter_gets_a_gradient(shape):
    model = build_model(shape, VOCAB)
    idx, targets = batch()
    assert model(idx).shape == (3, 20, VOCAB)
    loss = model(idx, targets)
    assert abs(loss.item() - math.log(VOCAB)) < 0.3
    loss.backward()
    idle = {n for n, p in model.named_parameters() if p.grad is None}
    assert all(".experts." in name for name in idle)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_position_does_not_see_later_ones(shape):
    model = build_model(shape, VOCAB).eval()
    idx, _ = batch()
    changed = idx.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % VOCAB
    before, after = model(idx), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(before[:, 12:], after[:, 12:])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_order_of_the_experts_changes_no_bit_of_loss_or_gradients(checkpointing):
    model = build_model(moe_config(), VOCAB)
    if checkpointing:
        checkpoint_layers(model)
    ascending = loss_and_grads(model)
    seen = []

    def backwards(used, routing):
        seen.append((used, routing.shape))
        return used[::-1]

    def rotated(used, routing):
        return used[1:] + used[:1]

    for order in (backwards, rotated):
        for module in model.modules():
            if isinstance(module, MoE):
                module.expert_order = order
        assert_same_bits(ascending, loss_and_grads(model))
    assert all(used == sorted(used) and shape == (60, 2) for used, shape in seen)


def test_a_mixture_of_experts_equals_a_loop_over_tokens():
    layer = MoE(moe_config(router_z_coef=0.5))
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1))
    got, auxiliary = layer(x)
    tokens = x.flatten(0, 1)
    logits = tokens @ layer.router.weight.T
    probs = logits.softmax(-1)
    expected, chosen = torch.zeros_like(tokens), torch.zeros(6)
    for row, token in enumerate(tokens):
        best = probs[row].argsort(descending=True)[:2]
        chosen[best] += 1
        for expert in best:
            gate = probs[row, expert] / probs[row, best].sum()
            expected[row] += gate * layer.experts[int(expert)](token)
    torch.testing.assert_close(got, expected.view_as(x))
    balance = 0.01 * 6 * (chosen / chosen.sum() * probs.mean(0)).sum()
    torch.testing.assert_close(auxiliary, balance + 0.5 * logits.logsumexp(-1).square().mean())


def test_an_expert_without_tokens_does_not_run_and_gets_no_gradient():
    layer = MoE(moe_config())
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:2] = 1.0
    ran = []
    for index, expert in enumerate(layer.experts):
        expert.register_forward_pre_hook(lambda *_, index=index: ran.append(index))
    x = torch.rand(1, 5, 32)
    layer(x)[0].sum().backward()
    assert ran == [0, 1]
    assert layer.experts[0].w1.weight.grad is not None
    assert all(p.grad is None for p in layer.experts[2:].parameters())


def test_checkpointed_activations_change_no_bit():
    for shape in (config(), moe_config()):
        plain = loss_and_grads(build_model(shape, VOCAB))
        model = build_model(shape, VOCAB)
        checkpoint_layers(model)
        assert_same_bits(plain, loss_and_grads(model))


def test_evaluation_loss_is_the_cross_entropy_alone():
    model = build_model(moe_config(balance_coef=1.0), VOCAB)
    idx, targets = batch()
    entropy = F.cross_entropy(model(idx).flatten(0, 1), targets.flatten())
    assert model(idx, targets) > entropy + 0.9
    torch.testing.assert_close(model.eval()(idx, targets), entropy)


def test_targets_of_minus_one_hundred_do_not_count():
    model = build_model(config(), VOCAB)
    idx, targets = batch()
    masked = targets.clone()
    masked[:, 10:] = -100
    torch.testing.assert_close(
        model(idx, masked), model(idx[:, :10], targets[:, :10]), rtol=1e-5, atol=1e-6
    )


def test_rotary_scores_depend_on_the_distance_alone():
    shape = config()
    q, k = torch.randn(2, 1, 1, 1, shape.head_size).unbind()

    def score(at_q: int, at_k: int) -> torch.Tensor:
        turned_q = rotate(q, rope_tables(at_q, 1, shape, q.device))
        turned_k = rotate(k, rope_tables(at_k, 1, shape, q.device))
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(score(3, 1), score(103, 101), rtol=1e-3, atol=1e-3)
    assert not torch.isclose(score(3, 1), score(3, 2))


def test_weights_do_not_depend_on_the_order_of_initialisation():
    shape = moe_config()
    whole = build_model(shape, VOCAB, seed=5)
    parts = build_model(shape, VOCAB, device="meta").to_empty(device="cpu")
    initialize = initializer(shape, 5)
    for fqn, module in reversed(list(parts.named_modules())):
        initialize(fqn, module)
    assert_same_bits(whole.state_dict(), parts.state_dict())
    other = build_model(shape, VOCAB, seed=6)
    assert not torch.equal(whole.head.weight, other.head.weight)
    assert torch.equal(whole.norm.weight, torch.ones(32))


def test_weights_initialised_through_views_of_one_buffer_are_the_same():
    buffer = torch.zeros(3 * 48 * 32 + 16)
    views, expected = FeedForward(32, 48, "swiglu"), FeedForward(32, 48, "swiglu")
    offset = 16
    for linear in views.children():
        shape = linear.weight.shape
        linear.weight.data = buffer[offset : offset + shape.numel()].view(shape)
        offset += shape.numel()
    for model in (views, expected):
        for fqn, module in model.named_modules():
            init_weights(fqn, module)
    assert_same_bits(views.state_dict(), expected.state_dict())
    assert buffer[:16].eq(0).all() and buffer[16:].std() > 0


def test_the_deeper_the_model_the_smaller_what_writes_to_the_residual_stream():
    model = build_model(config(num_layers=8, hidden_size=64), VOCAB)
    block = model.layers[3]
    assert block.attn.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert block.attn.o_proj.weight.std().item() == pytest.approx(0.005, rel=0.1)
    assert block.mlp.w2.weight.std().item() == pytest.approx(0.005, rel=0.1)


def test_tied_weights_are_one_parameter_wherever_the_model_is_built():
    shape = config(tie_embeddings=True)
    for device in ("meta", "cpu"):
        model = build_model(shape, VOCAB, device=device)
        assert model.head.weight is model.embed.weight
    assert "head.weight" not in model_shapes(shape, VOCAB)
    untied = build_model(config(), VOCAB)
    assert torch.equal(model.embed.weight, untied.embed.weight)


def test_shapes_are_known_without_allocating_and_there_are_no_buffers():
    shape = moe_config(num_kv_heads=2)
    model = build_model(shape, VOCAB, device="meta")
    assert all(p.is_meta for p in model.parameters())
    assert list(model.buffers()) == []
    shapes = model_shapes(shape, VOCAB)
    assert shapes == {n: p.shape for n, p in build_model(shape, VOCAB).named_parameters()}
    assert shapes["layers.1.mlp.experts.5.w1.weight"] == (16, 32)
    assert shapes["layers.0.attn.k_proj.weight"] == (16, 32)
