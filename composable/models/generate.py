"""Sampling from a model, without a cache: every token is a forward pass over the context."""

import torch
from torch import Tensor, nn


@torch.no_grad()
def generate(
    model: nn.Module, prompt: Tensor, count: int, *, temperature: float = 1.0, context: int, seed: int = 0
) -> Tensor:
    """Continue a prompt.

    Every rank of a sharded model must call it alike, and gets the same tokens: the draw is made on the CPU from `seed`.

    Args:
        model: `model(tokens [1, S])` gives logits [1, S, V].
        prompt: [P] token ids, at least one.
        count: tokens to add.
        temperature: of the softmax; 0 takes the likeliest token.
        context: most tokens the model is shown at once.

    Returns:
        [P + count] token ids on the prompt's device.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt
    for _ in range(count):
        logits = model(tokens[None, -context:])[0, -1].float().cpu()  # [V]
        if temperature == 0:
            chosen = logits.argmax(keepdim=True)
        else:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, chosen.to(tokens)])
    return tokens
