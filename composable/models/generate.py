"""Sampling from a model: greedy, or drawn from the likeliest tokens; with a cache of keys and values, or without."""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from composable.models.cache import cached
from composable.models.decoder import Decoder


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0
    """of the softmax; 0 takes the likeliest token"""
    top_k: int = 0
    """only so many of the likeliest tokens are drawn from; 0: all"""
    top_p: float = 1.0
    """only the likeliest tokens whose probabilities together reach this are drawn from"""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: 0 takes the likeliest token, more draws more freely")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: a number of tokens; 0 draws from all")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: a probability above 0, at most 1")


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """The next token [1] int64, from logits [V]; among equals the likeliest is the one with the lowest id."""
    if logits.isnan().any():
        raise ValueError("the model's logits are no numbers (NaN): its weights are broken, or its dtype is too narrow")
    if sampling.temperature == 0:
        return logits.argmax(keepdim=True)
    scores, ids = ((logits.double() - logits.max()) / sampling.temperature).sort(descending=True, stable=True)
    probabilities = scores.softmax(-1)
    if sampling.top_k:
        probabilities[sampling.top_k :] = 0
    if sampling.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities
        probabilities[before >= sampling.top_p * probabilities.sum()] = 0  # the likeliest always stays
    return ids[torch.multinomial(probabilities, 1, generator=generator)]


@torch.no_grad()
def stream(
    model: nn.Module,
    prompt: Tensor,
    count: int,
    sampling: Sampling,
    *,
    context: int,
    seed: int = 0,
    stop: Collection[int] = (),
    cache: bool = False,
) -> Iterator[int]:
    """The tokens that continue a prompt, one by one.

    Every rank of a sharded model must call it alike, and gets the same tokens: the draw is made on the CPU from `seed`.

    Args:
        model: `model(tokens [1, S])` gives logits [1, S, V].
        prompt: [P] token ids, at least one.
        count: most tokens to add.
        context: most tokens the model is shown at once; older ones are dropped.
        stop: tokens that end the text; the one that does is given too.
        cache: keep keys and values, of a `Decoder` that is whole; P + count must be at most `context`.

    Raises:
        ValueError: an empty prompt, or one that leaves no room with a cache.
    """
    if prompt.numel() == 0:
        raise ValueError("the prompt has no token, and a model continues at least one")
    if cache and prompt.numel() + count > context:
        raise ValueError(
            f"a prompt of {prompt.numel()} tokens and {count} more exceed the context of {context}; ask for "
            f"{max(0, context - prompt.numel())} at most, or do without the cache"
        )
    generator = torch.Generator().manual_seed(seed)
    with _steps(model, prompt.numel() + count, context, cache) as step:
        tokens = prompt
        for _ in range(count):
            chosen = choose(step(tokens)[0, -1].float().cpu(), sampling, generator)
            yield int(chosen)
            if int(chosen) in stop:
                return
            tokens = chosen.to(tokens) if cache else torch.cat([tokens, chosen.to(tokens)])


def generate(
    model: nn.Module, prompt: Tensor, count: int, *, temperature: float = 1.0, context: int, seed: int = 0
) -> Tensor:
    """The prompt [P] and `count` more tokens [P + count], without a cache; arguments as `stream` has them."""
    more = stream(model, prompt, count, Sampling(temperature), context=context, seed=seed)
    return torch.cat([prompt, torch.tensor(list(more), dtype=prompt.dtype, device=prompt.device)])


@contextlib.contextmanager
def _steps(model: nn.Module, length: int, context: int, cache: bool) -> Iterator[Callable[[Tensor], Tensor]]:
    """tokens [S], the new ones with a cache and all without -> logits [1, S, V]."""
    if not cache:
        yield lambda tokens: model(tokens[None, -context:])
        return
    assert isinstance(model, Decoder)
    with cached(model, length) as step:
        yield lambda tokens: step(tokens[None])
