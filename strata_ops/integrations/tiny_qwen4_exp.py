"""A real `Qwen4ExpForCausalLM` with random weights, small enough for a laptop: for tests, benchmarks and examples."""

from __future__ import annotations

from typing import Any

import torch


def tiny_qwen4_exp(
    hidden_size: int = 2560, hc_count: int = 4, hc_lowrank: int = 320, *, layers: int = 4, seed: int = 0, **config: Any
) -> Any:
    """The model, in float32, in eval mode, on the CPU; the same for the same seed. Needs Transformers 5.17 or later.

    The residual streams are of the size asked for, all else is small. The hyper-connection weights are values that bf16
    holds, as a checkpoint's are, so a patched model reads the same weights. `config` adds to the configuration.
    """
    from transformers import Qwen4ExpForCausalLM
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    settings: dict[str, Any] = {
        "hidden_size": hidden_size,
        "hc_count": hc_count,
        "hc_lowrank": hc_lowrank,
        "num_hidden_layers": layers,
        # Transformers 5.17 and 5.24 have different names for indexed attention, and both know it by this one.
        "layer_types": [
            "full_attention" if i % 4 == 3 or i == layers - 1 else "linear_attention" for i in range(layers)
        ],
        "vocab_size": 1024,
        "max_position_embeddings": 1024,
        "eos_token_id": None,
        "pad_token_id": 0,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 64,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 2,
    }
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**(settings | config)))
        for name, weight in model.named_parameters():
            if name.endswith("hc_norm.weight"):
                weight.normal_(std=0.1)
            if "hyper_connection" in name:
                weight.copy_(weight.bfloat16())
    return model.eval()
