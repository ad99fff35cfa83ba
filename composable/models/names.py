"""What a model's tensors are called in a checkpoint: the stacked experts one by one, under their family's names."""

import re
from collections.abc import Iterator, Mapping

from torch import Tensor

from composable.checkpoint.shards import Box, Piece, pieces_of
from composable.models.config import DecoderConfig
from composable.models.families import family_of

_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")
_EXPERTS = {  # ours, a stack of experts -> the names of each
    "mlp.experts.gate_proj": "mlp.experts.{expert}.gate_proj.weight",
    "mlp.experts.up_proj": "mlp.experts.{expert}.up_proj.weight",
    "mlp.experts.gate_up_proj": "mlp.experts.{expert}.gate_up_proj.weight",
    "mlp.experts.down_proj": "mlp.experts.{expert}.down_proj.weight",
    "mlp.experts.gate_bias": "mlp.experts.{expert}.gate_proj.bias",
    "mlp.experts.up_bias": "mlp.experts.{expert}.up_proj.bias",
    "mlp.experts.gate_up_bias": "mlp.experts.{expert}.gate_up_proj.bias",
    "mlp.experts.down_bias": "mlp.experts.{expert}.down_proj.bias",
}
_RENAMED: Mapping[str, Mapping[str, str]] = {  # family -> ours -> theirs, where they are others
    "mixtral": {
        "mlp.gate": "block_sparse_moe.gate",
        "mlp.experts.gate_proj": "block_sparse_moe.experts.{expert}.w1.weight",
        "mlp.experts.up_proj": "block_sparse_moe.experts.{expert}.w3.weight",
        "mlp.experts.down_proj": "block_sparse_moe.experts.{expert}.w2.weight",
    },
    "qwen2_moe": {"mlp.shared_experts": "mlp.shared_expert"},
    "gpt_oss": {  # the stacks as they are
        "mlp.gate": "mlp.router",
        "mlp.experts.gate_up_proj": "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj": "mlp.experts.down_proj",
        "mlp.experts.gate_up_bias": "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down_bias": "mlp.experts.down_proj_bias",
    },
}
_TRANSPOSED: Mapping[str, tuple[str, ...]] = {  # family -> ends of their names, of stacks whose matrices are [in, out]
    "gpt_oss": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
}


def in_file(tensors: Mapping[str, Tensor | Piece], config: DecoderConfig) -> dict[str, Tensor | Piece]:
    """The tensors under the names that they have in a checkpoint: for saving, and for loading into them.

    A stack of experts [E, F, D] becomes one `Piece` [F, D] for each expert of which this rank holds a part; its local
    tensor is a view of the rank's part of the stack. What the optimizer has one number of for a stack (AdamW's `step`)
    stands under each of these experts. Where the family has stacks in its files they stay whole, as a transposed view
    if it has them so. Other tensors are given as they are.

    Args:
        tensors: parameters and buffers, or optimizer state as "<parameter>.<state>"; of the whole model or a part of
            it. DTensors of any layout that a checkpoint can hold.
        config: what the model is; it chooses the family as `families.to_hugging_face` does.

    Raises:
        ValueError: a stack whose local tensor is no part of it (`Partial`); a number for a stack of which no tensor
            is given, so that nothing says which experts are here.
    """
    if config.moe is None:
        return dict(tensors)
    family = family_of(config)
    table = _EXPERTS | dict(_RENAMED.get(family, {}))
    turned = _TRANSPOSED.get(family, ())
    out: dict[str, Tensor | Piece] = {}
    stacks: dict[str, dict[str, Tensor | Piece]] = {}  # a stack's name in the file -> what follows it -> tensor
    for name, tensor in tensors.items():
        renamed, state = _renamed(name, table)
        if "{expert}" in renamed:
            stacks.setdefault(renamed, {})[state] = tensor
        elif renamed.endswith(turned) and not (isinstance(tensor, Tensor) and tensor.ndim == 0):
            out[renamed + state] = _transposed(renamed + state, tensor)
        else:
            out[renamed + state] = tensor
    for renamed, states in stacks.items():
        out |= dict(_unstacked(renamed, states))
    return out


def _renamed(name: str, table: Mapping[str, str]) -> tuple[str, str]:
    """The name in the file, and what follows what the table renamed."""
    if match := _LAYER.fullmatch(name):
        layer, rest = match.groups()
        for ours, theirs in table.items():
            if rest == ours or rest.startswith(ours + "."):
                return layer + theirs, rest[len(ours) :]
    return name, ""


def _transposed(name: str, tensor: Tensor | Piece) -> Piece:
    """A stack [E, O, I] as [E, I, O], without a copy."""
    piece = pieces_of({name: tensor})[name]
    (e, o, i), box = piece.shape, piece.box
    turned = Box(*((first, third, second) for first, second, third in (box.offsets, box.sizes)))
    return Piece(piece.local.mT, (e, i, o), turned)


def _unstacked(name: str, states: Mapping[str, Tensor | Piece]) -> Iterator[tuple[str, Tensor | Piece]]:
    numbers = {state: tensor for state, tensor in states.items() if isinstance(tensor, Tensor) and tensor.ndim == 0}
    stacks = pieces_of({name + state: tensor for state, tensor in states.items() if state not in numbers})
    if not stacks:
        raise ValueError(
            f"{name + next(iter(numbers))} is one number for all experts, and no stacked tensor beside it says which "
            "of them are on this rank; give the stack's other tensors too"
        )
    for stacked, piece in stacks.items():
        for place, expert in enumerate(_experts(piece)):
            box = Box(piece.box.offsets[1:], piece.box.sizes[1:])
            yield stacked.replace("{expert}", str(expert)), Piece(piece.local[place], piece.shape[1:], box)
    for state, number in numbers.items():
        for expert in _experts(next(iter(stacks.values()))):
            yield name.replace("{expert}", str(expert)) + state, number


def _experts(piece: Piece) -> range:
    """Global indices of the experts of which a rank's part of a stack holds something."""
    return range(piece.box.offsets[0], piece.box.offsets[0] + piece.box.sizes[0])
