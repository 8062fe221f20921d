"""Decoder layers of public models, as their configurations define them (fused experts)."""

from __future__ import annotations

from odc.sharding import TensorSpec

Shapes = dict[str, tuple[int, ...]]


def gpt_oss_20b() -> list[TensorSpec]:
    return _named(
        {
            "sinks": (64,),
            "q": (4096, 2880),
            "q.bias": (4096,),
            "k": (512, 2880),
            "k.bias": (512,),
            "v": (512, 2880),
            "v.bias": (512,),
            "o": (2880, 4096),
            "o.bias": (2880,),
            "router": (32, 2880),
            "router.bias": (32,),
            "gate_up": (32, 2880, 5760),
            "gate_up.bias": (32, 5760),
            "down": (32, 2880, 2880),
            "down.bias": (32, 2880),
            "norm1": (2880,),
            "norm2": (2880,),
        }
    )


def qwen3_30b() -> list[TensorSpec]:
    return _named(
        {
            "q": (4096, 2048),
            "k": (512, 2048),
            "v": (512, 2048),
            "o": (2048, 4096),
            "q_norm": (128,),
            "k_norm": (128,),
            "router": (128, 2048),
            "gate_up": (128, 1536, 2048),
            "down": (128, 2048, 768),
            "norm1": (2048,),
            "norm2": (2048,),
        }
    )


def deepseek_v3_experts_apart() -> list[TensorSpec]:
    """A layer of DeepSeek-V3 with a tensor for every expert's projection: 782 tensors."""
    shapes: Shapes = {
        "q_a": (1536, 7168),
        "q_a_norm": (1536,),
        "q_b": (24576, 1536),
        "kv_a": (576, 7168),
        "kv_a_norm": (512,),
        "kv_b": (32768, 512),
        "o": (7168, 16384),
        "norm1": (7168,),
        "norm2": (7168,),
        "router": (256, 7168),
    }
    for expert in range(257):
        shapes[f"experts.{expert}.gate"] = (2048, 7168)
        shapes[f"experts.{expert}.up"] = (2048, 7168)
        shapes[f"experts.{expert}.down"] = (7168, 2048)
    return _named(shapes)


def _named(shapes: Shapes) -> list[TensorSpec]:
    return [TensorSpec(name, shape) for name, shape in shapes.items()]
