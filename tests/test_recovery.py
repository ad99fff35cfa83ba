"""A router that sends all tokens to two of eight experts recovers by each way of balancing, and by none without."""

import functools
from itertools import islice

import pytest
import torch
from torch import Tensor

from composable.data.loader import DataConfig, build_loader
from composable.models.config import DecoderConfig
from composable.moe.config import Balance, MoEConfig
from composable.observe.routing import VIRIDIS, heat_map, load
from composable.optim.optimizers import OptimizerConfig, build_optimizer
from composable.recipe import Recipe
from composable.state import Corpus
from composable.step import train_step
from composable.train import build_model

STEPS = 150
WINDOW = 10
WAYS = {
    "switch": Balance(switch=1.0),
    "kl": Balance(kl=1.0),
    "sequence": Balance(sequence=1.0),
    "bias update": Balance(bias_rate=0.03),
}


def windows(balance: Balance, sigmoid: bool) -> list[Tensor]:
    """[L, E] choices over the last steps, after each step of a training that starts with a skewed router."""
    moe = MoEConfig(
        8, 2, 16, score="sigmoid" if sigmoid else "softmax", correction=sigmoid, router_bias=True, balance=balance
    )
    model = DecoderConfig(
        vocab_size=256, dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64, qk_norm=True, moe=moe
    )
    data = DataConfig(seq_len=64, micro_batch=8, global_batch=8)
    recipe, _ = Recipe("recovery", model, data=data, optimizer=OptimizerConfig(lr=3e-3)).resolve(1)
    composed = build_model(recipe, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in composed.named.items():
            if name.endswith("gate.bias"):
                parameter[:2] = 3.0
    optimizer = build_optimizer(composed.parts, recipe.optimizer, only=composed.named)
    tokens, counts = Corpus.open(data, 256).train, []
    batches = build_loader(tokens, data, seed=1, position=0, data_rank=0, data_ranks=1)
    for step, batch in enumerate(islice(batches, STEPS), 1):
        train_step(composed, optimizer, [batch], step=step, lr=3e-3, max_norm=1.0)
        counts.append(composed.routing().chosen)
    return [torch.stack(counts[max(0, end - WINDOW) : end]).sum(0) for end in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def trained(pool):
    return functools.lru_cache(lambda balance, sigmoid: pool.run(1, windows, balance, sigmoid)[0])


@pytest.mark.parametrize("sigmoid", [False, True])
def test_without_balance_a_skewed_router_stays_collapsed(sigmoid, trained):
    counts = trained(Balance(), sigmoid)
    assert min(load(window).max().item() for window in counts) > 3.9  # 4 is all that two experts can get


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_balancing_brings_the_load_of_every_layer_below_one_and_a_half(way, trained):
    counts = trained(WAYS[way], way == "bias update")
    worst = [load(window).max().item() for window in counts]
    assert worst[0] > 3.9
    assert min(worst) < 1.5
    assert max(worst[-WINDOW:]) < 2.5


def test_the_picture_shows_two_bright_columns_that_become_eight_alike(trained):
    counts = trained(WAYS["switch"], False)
    best = min(counts, key=lambda window: load(window).max().item())
    before, after = (heat_map(load(window)) for window in (counts[0], best))
    size = before.shape[1] // 2
    cells = before[:, size // 2 :: size, size // 2 :: size].permute(1, 2, 0)  # [L, E, 3]
    assert cells[:, :2].reshape(-1, 3).tolist() == [list(VIRIDIS[-1])] * 4
    assert cells[:, 2:].reshape(-1, 3).tolist() == [list(VIRIDIS[0])] * 12
    cells = after[:, size // 2 :: size, size // 2 :: size].permute(1, 2, 0).float()
    assert (cells.amax((0, 1)) - cells.amin((0, 1))).max() < 80  # of 255, in any colour
