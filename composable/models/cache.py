"""Keys and values of the tokens that a decoder has seen, so that the next token costs one token's work."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composable.models import attention
from composable.models.decoder import Decoder


class KeyValueCache:
    """What attention of each layer has seen of one sequence, at most `length` tokens of it.

    Attention of a pass over S tokens that follow `seen` ones sees all of them. What a pass was given beyond the
    tokens that are kept (`keep`) is forgotten: tensor ranks pad a pass to a length that they can share.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.seen = 0
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys, values [B, H_kv, more than length, hd]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *, window: int = 0, **more: Any
    ) -> Tensor:
        """A layer's attention: q [B, H, S, hd] of new tokens over all tokens; k, v [B, H_kv, S, hd] of the new ones."""
        end = self.seen + q.size(2)
        keys, values = (self._extended(layer, which, new) for which, new in enumerate((k, v)))
        if self.seen == 0:
            return attention.attend(q, k, v, mask, window=window, **more)
        rows = torch.arange(self.seen, end, device=q.device)[:, None]
        columns = torch.arange(end, device=q.device)
        visible = columns <= rows
        if window:
            visible &= columns > rows - window
        return attention.attend(q, keys[:, :, :end], values[:, :, :end], visible[None, None], **more)

    def keep(self, count: int) -> None:
        """The first `count` tokens of the last pass were the sequence's."""
        self.seen += count

    def _extended(self, layer: int, which: int, new: Tensor) -> Tensor:
        if layer not in self._kept:
            self._kept[layer] = (torch.empty(0), torch.empty(0))
        pair = list(self._kept[layer])
        end = self.seen + new.size(2)
        if pair[which].numel() == 0:
            # all at once: a cache that grows would be copied at every step
            pair[which] = new.new_empty(*new.shape[:2], max(end, self.length), new.size(3))
        elif pair[which].size(2) < end:  # the padding of a last pass
            room = new.new_empty(*new.shape[:2], end - pair[which].size(2), new.size(3))
            pair[which] = torch.cat((pair[which], room), dim=2)
        pair[which][:, :, self.seen : end] = new
        self._kept[layer] = (pair[0], pair[1])
        return pair[which]


@contextlib.contextmanager
def cached(model: Decoder, length: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """A function of new tokens [B, S] that gives the logits [B, S, V] after all tokens it was given before.

    The model is whole (no stage) and may be spread over tensor ranks, which all call alike; it is as before when the
    context ends.

    Args:
        length: tokens in all, for which room is made.
    """
    cache = KeyValueCache(length)

    def step(tokens: Tensor) -> Tensor:
        positions = torch.arange(cache.seen, cache.seen + tokens.size(1), device=tokens.device)
        logits = model(tokens, positions=positions)
        cache.keep(tokens.size(1))
        return logits

    attentions = [block.get_submodule("self_attn") for block in model.blocks]
    before = [module.attend for module in attentions]
    try:
        for layer, module in enumerate(attentions):
            module.attend = partial(cache.attend, layer)  # type: ignore[assignment]
        yield step
    finally:
        for module, attend in zip(attentions, before, strict=True):
            module.attend = attend
