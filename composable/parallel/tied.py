"""An embedding that is the head's weight too, when the two lie in different stages of a pipeline.

The last stage then has a copy under the same name. Both start alike, as initial weights depend on the name; their
gradients are summed before the norm, so the optimizer keeps them alike; the norm counts one of them.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable.models.decoder import Decoder
from composable.optim.local import local


def tied_original(parts: Sequence[nn.Module]) -> nn.Parameter | None:
    """The embedding's weight, if this rank holds the first stage of a tied model of several stages."""
    found = [part for part in parts if isinstance(part, Decoder) and part.first and part.model.norm is None]
    return _weight(found)


def tied_copy(parts: Sequence[nn.Module]) -> nn.Parameter | None:
    """The head's copy of the embedding's weight, if this rank holds the last stage of a tied model of several."""
    found = [part for part in parts if isinstance(part, Decoder) and not part.first and part.model.norm is not None]
    return _weight(found)


def _weight(found: Sequence[Decoder]) -> nn.Parameter | None:
    if not found or not found[0].config.tied or found[0].model.embed_tokens is None:
        return None
    weight = found[0].model.embed_tokens.weight
    assert isinstance(weight, nn.Parameter)
    return weight


def counted(parts: Sequence[nn.Module]) -> list[nn.Parameter]:
    """This rank's parameters without the head's copy: those of the gradient norm. Clipping scales the copy too."""
    copy = tied_copy(parts)
    return [parameter for part in parts for parameter in part.parameters() if parameter is not copy]


def named(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Name -> parameter of this rank's parts, one for each name: the original where a rank holds both (V schedules).

    For checkpoints. Ranks that hold one of the two save and load it as any weight that several ranks hold.
    """
    table: dict[str, nn.Parameter] = {}
    for part in sorted(parts, key=lambda part: not getattr(part, "first", True)):
        for name, parameter in part.named_parameters():
            table.setdefault(name, parameter)
    return table


@torch.no_grad()
def sum_tied_gradients(parts: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
    """Give both copies the sum of their gradients: after every other reduction, before the norm.

    The ranks at the two ends of the pipeline exchange their shards; where one rank holds both, it adds them up.
    Others do nothing.

    Args:
        group: the ranks of the pipeline, in order.
    """
    original, copy = tied_original(parts), tied_copy(parts)
    if original is not None and copy is not None:
        total = _gradient(original).add_(_gradient(copy))
        _gradient(copy).copy_(total)
    elif original is not None or copy is not None:
        mine = _gradient(original if original is not None else copy)
        peer = dist.get_world_size(group) - 1 if original is not None else 0
        if not mine.numel():  # a shard of few rows may be empty, on both ranks
            return
        theirs = torch.empty_like(mine)
        exchange = [
            dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
            dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        mine.add_(theirs)


@torch.no_grad()
def copy_tied_weight(parts: Sequence[nn.Module]) -> None:
    """Write the original into the copy where one rank holds both: after loading, and after an update of the original.

    Where they lie on two ranks, both are loaded, and both updated by equal gradients.
    """
    original, copy = tied_original(parts), tied_copy(parts)
    if original is not None and copy is not None:
        local(copy).copy_(local(original))


def _gradient(parameter: nn.Parameter | None) -> Tensor:
    """The local gradient; zeros are put where there is none, as the other rank sends its own in any case."""
    assert parameter is not None
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)
