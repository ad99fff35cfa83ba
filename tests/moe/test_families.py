"""The same weights in `transformers` and here: the same choices, weights and outputs."""

import pytest
import torch
import transformers
from torch import nn

from composable.moe.config import MoEConfig, deepseek_v3, mixtral, olmoe, qwen3_moe
from composable.moe.layer import MoE
from composable.moe.router import route

D, F, E, K = 16, 24, 8, 2
SMALL = dict(
    vocab_size=32,
    hidden_size=D,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=F,
    num_experts_per_tok=K,
)


def block_of(name):
    """(their layer, our config) with random weights."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3
    from transformers.models.mixtral import modeling_mixtral
    from transformers.models.olmoe import modeling_olmoe
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    torch.manual_seed(3)
    t = transformers
    if name == "mixtral":
        return modeling_mixtral.MixtralSparseMoeBlock(t.MixtralConfig(**SMALL, num_local_experts=E)), mixtral(E, K, F)
    if name.startswith("qwen3"):
        norm = name == "qwen3_normalised"
        config = t.Qwen3MoeConfig(**SMALL, num_experts=E, moe_intermediate_size=F, norm_topk_prob=norm)
        return modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config), qwen3_moe(E, K, F, norm)
    if name == "olmoe":
        return modeling_olmoe.OlmoeSparseMoeBlock(t.OlmoeConfig(**SMALL, num_experts=E)), olmoe(E, K, F)
    config = t.DeepseekV3Config(
        **SMALL, n_routed_experts=E, moe_intermediate_size=F, n_group=4, topk_group=2, n_shared_experts=1
    )
    return modeling_deepseek_v3.DeepseekV3MoE(config), deepseek_v3(E, K, F, F, groups=4, groups_kept=2)


class Shared(nn.Module):
    """Their shared expert, under our name."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def ours(theirs, config: MoEConfig) -> MoE:
    moe = MoE(D, config, shared=Shared(theirs.shared_experts) if config.shared_ffn else None)
    with torch.no_grad():
        for parameter in theirs.parameters():
            nn.init.normal_(parameter, std=0.5)
        gate, up = theirs.experts.gate_up_proj.chunk(2, dim=1)
        pairs = [(moe.experts.gate_proj, gate), (moe.experts.up_proj, up), (moe.gate.weight, theirs.gate.weight)]
        for mine, other in [*pairs, (moe.experts.down_proj, theirs.experts.down_proj)]:
            mine.copy_(other)
        if config.correction:
            theirs.gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, E))
            moe.gate.e_score_correction_bias.copy_(theirs.gate.e_score_correction_bias)
    return moe


@pytest.mark.parametrize("name", ["mixtral", "qwen3_normalised", "qwen3_plain", "olmoe", "deepseek_v3"])
def test_choices_weights_and_outputs_are_those_of_transformers(name):
    theirs, config = block_of(name)
    moe = ours(theirs, config)
    x = torch.randn(2, 16, D)
    logits, weights, ids = theirs.gate(x.view(-1, D))
    routing = route(moe.gate(x.view(-1, D)), config, moe.gate.e_score_correction_bias)
    order = ids.argsort(-1), routing.ids.argsort(-1)  # theirs are not always sorted by weight
    assert torch.equal(ids.gather(1, order[0]), routing.ids.gather(1, order[1]))
    assert torch.allclose(weights.gather(1, order[0]), routing.weights.gather(1, order[1]), atol=1e-6)
    assert torch.allclose(logits, moe.gate(x.view(-1, D)), atol=1e-5)
    with torch.no_grad():
        wanted, got = theirs(x), moe(x)
    assert (got - wanted).abs().max() <= 1e-5 * max(1.0, wanted.abs().max().item())
