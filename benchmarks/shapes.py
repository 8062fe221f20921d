"""Parameter lists of public models, from their published configurations (fused experts, bf16)."""

from __future__ import annotations

from collections.abc import Callable

from odc.sharding import TensorSpec

Shapes = dict[str, tuple[int, ...]]


def _model(
    vocab: int, hidden: int, layers: int, layer: Callable[[int], Shapes], tied: bool = False
) -> list[TensorSpec]:
    found = [TensorSpec("embed_tokens.weight", (vocab, hidden))]
    for number in range(layers):
        found += [TensorSpec(f"layers.{number}.{n}", shape) for n, shape in layer(number).items()]
    found.append(TensorSpec("norm.weight", (hidden,)))
    return found if tied else [*found, TensorSpec("lm_head.weight", (vocab, hidden))]


def _attention(hidden: int, heads: int, kv_heads: int, size: int) -> Shapes:
    return {
        "norm1": (hidden,),
        "norm2": (hidden,),
        "q_proj": (heads * size, hidden),
        "k_proj": (kv_heads * size, hidden),
        "v_proj": (kv_heads * size, hidden),
        "o_proj": (hidden, heads * size),
    }


def _experts(hidden: int, inner: int, experts: int) -> Shapes:
    return {
        "router": (experts, hidden),
        "experts.gate_up_proj": (experts, 2 * inner, hidden),
        "experts.down_proj": (experts, hidden, inner),
    }


def _mlp(hidden: int, inner: int, name: str = "mlp") -> Shapes:
    return {
        f"{name}.gate_proj": (inner, hidden),
        f"{name}.up_proj": (inner, hidden),
        f"{name}.down_proj": (hidden, inner),
    }


def deepseek_v3() -> list[TensorSpec]:
    """671B: three dense layers, then 58 with 256 routed experts and a shared one."""

    def layer(number: int) -> Shapes:
        own: Shapes = {
            "q_a_proj": (1536, 7168),
            "q_a_norm": (1536,),
            "q_b_proj": (24576, 1536),
            "kv_a_proj": (576, 7168),
            "kv_a_norm": (512,),
            "kv_b_proj": (32768, 512),
            "o_proj": (7168, 16384),
            "norm1": (7168,),
            "norm2": (7168,),
        }
        if number < 3:
            return {**own, **_mlp(7168, 18432)}
        return {**own, **_experts(7168, 2048, 256), **_mlp(7168, 2048, "shared")}

    return _model(129280, 7168, 61, layer)


def gpt_oss_120b() -> list[TensorSpec]:
    """128 experts, a bias beside every matrix."""

    def layer(_: int) -> Shapes:
        shapes = _attention(2880, 64, 8, 64)
        shapes |= {
            "sinks": (64,),
            "router": (128, 2880),
            "router.bias": (128,),
            "experts.gate_up_proj": (128, 2880, 5760),
            "experts.gate_up_proj_bias": (128, 5760),
            "experts.down_proj": (128, 2880, 2880),
            "experts.down_proj_bias": (128, 2880),
        }
        biases = {f"{name}.bias": shapes[name][:1] for name in shapes if name.endswith("o_proj")}
        biases |= {f"{name}.bias": shapes[name][:1] for name in ("q_proj", "k_proj", "v_proj")}
        return {**shapes, **biases}

    return _model(201088, 2880, 36, layer)


def qwen3_30b() -> list[TensorSpec]:
    """128 experts of 768."""

    def layer(_: int) -> Shapes:
        norms: Shapes = {"q_norm": (128,), "k_norm": (128,)}
        return {**_attention(2048, 32, 4, 128), **norms, **_experts(2048, 768, 128)}

    return _model(151936, 2048, 48, layer)


def mixtral_8x7b() -> list[TensorSpec]:
    """Eight large experts."""

    def layer(_: int) -> Shapes:
        return {**_attention(4096, 32, 8, 128), **_experts(4096, 14336, 8)}

    return _model(32000, 4096, 32, layer)


def llama_3_70b() -> list[TensorSpec]:
    """Dense."""

    def layer(_: int) -> Shapes:
        return {**_attention(8192, 64, 8, 128), **_mlp(8192, 28672)}

    return _model(128256, 8192, 80, layer)


MODELS = {
    "deepseek-v3-671b": deepseek_v3,
    "gpt-oss-120b": gpt_oss_120b,
    "qwen3-30b-a3b": qwen3_30b,
    "mixtral-8x7b": mixtral_8x7b,
    "llama-3-70b": llama_3_70b,
}
