"""Parameters of published sizes, exactly, from their config.json alone; `transformers` counts the same."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from composable.models.count import count_parameters
from composable.models.families import from_hugging_face
from tests.models import test_family_deepseek as deepseek
from tests.models import test_family_gpt_oss as gpt_oss


def sizes(
    family: str, vocabulary: int, dim: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> dict[str, Any]:
    """The values of a config.json that every family has, and more."""
    return {
        "model_type": family,
        "vocab_size": vocabulary,
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": False,
        **more,
    }


QWEN3_MOE = dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, head_dim=128)
QWEN2_MOE = dict(
    num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408, shared_expert_intermediate_size=5632
)
TIED = dict(tie_word_embeddings=True)
PLAIN: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "Llama-2-7b": (sizes("llama", 32000, 4096, 11008, 32, 32, 32), 6_738_415_616),
    "Meta-Llama-3-8B": (sizes("llama", 128256, 4096, 14336, 32, 32, 8), 8_030_261_248),
    "Llama-3.1-70B": (sizes("llama", 128256, 8192, 28672, 80, 64, 8), 70_553_706_496),
    "Llama-3.2-1B": (sizes("llama", 128256, 2048, 8192, 16, 32, 8, head_dim=64, **TIED), 1_235_814_400),
    "Mistral-7B-v0.1": (sizes("mistral", 32000, 4096, 14336, 32, 32, 8, sliding_window=4096), 7_241_732_096),
    "Mistral-7B-v0.3": (sizes("mistral", 32768, 4096, 14336, 32, 32, 8, sliding_window=None), 7_248_023_552),
    "Qwen2.5-0.5B": (
        sizes("qwen2", 151936, 896, 4864, 24, 14, 2, use_sliding_window=False, max_window_layers=24, **TIED),
        494_032_768,
    ),
    "Qwen2.5-7B": (sizes("qwen2", 152064, 3584, 18944, 28, 28, 4, use_sliding_window=False), 7_615_616_512),
    "Qwen3-0.6B": (sizes("qwen3", 151936, 1024, 3072, 28, 16, 8, head_dim=128, **TIED), 596_049_920),
    "Qwen3-8B": (sizes("qwen3", 151936, 4096, 12288, 36, 32, 8, head_dim=128), 8_190_735_360),
    "OLMo-2-1124-7B": (sizes("olmo2", 100352, 4096, 11008, 32, 32, 32), 7_298_617_344),
    "OLMo-2-1124-13B": (sizes("olmo2", 100352, 5120, 13824, 40, 40, 40), 13_716_198_400),
    "OLMoE-1B-7B-0924": (
        sizes("olmoe", 50304, 2048, 1024, 16, 16, 16, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False),
        6_919_161_856,
    ),
    "Mixtral-8x7B-v0.1": (
        sizes("mixtral", 32000, 4096, 14336, 32, 32, 8, num_local_experts=8, num_experts_per_tok=2),
        46_702_792_704,
    ),
    "Qwen3-30B-A3B": (sizes("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, **QWEN3_MOE), 30_532_122_624),
    "Qwen1.5-MoE-A2.7B": (sizes("qwen2_moe", 151936, 2048, 5632, 24, 16, 16, **QWEN2_MOE), 14_315_784_192),
}
COUNTS: Mapping[str, tuple[Mapping[str, Any], int]] = PLAIN | {  # name -> config.json, parameters
    "DeepSeek-V2-Lite": (deepseek.PUBLISHED["DeepSeek-V2-Lite"], 15_706_484_224),
    "DeepSeek-V2": (deepseek.PUBLISHED["DeepSeek-V2"], 235_741_434_880),
    # Its paper's 671,026,419,200 have the correction biases too, 256 in each of 58 layers, which no gradient trains.
    "DeepSeek-V3": (deepseek.PUBLISHED["DeepSeek-V3"], 671_026_419_200 - 58 * 256),
    "gpt-oss-20b": (gpt_oss.PUBLISHED, 20_914_757_184),
    "gpt-oss-120b": (gpt_oss.PUBLISHED_LARGE, 116_829_156_672),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_counted_from_config_json_alone(name):
    config, parameters = COUNTS[name]
    assert count_parameters(from_hugging_face(config)).total == parameters
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert sum(parameter.numel() for parameter in theirs.parameters()) == parameters
