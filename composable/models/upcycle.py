"""A dense checkpoint as the start of a model with experts (Komatsuzaki et al. 2022, arXiv:2212.05055).

With granularity G, G experts in a row, each of 1 / G of the dense hidden width, are one copy of the dense SwiGLU (as He
et al. 2024, arXiv:2410.07524, do). Their rows of the router start equal, so a token takes a whole copy or none of it.
"""

import dataclasses
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from composable.checkpoint.load import load
from composable.checkpoint.remote import Folder, as_folder
from composable.checkpoint.shards import Box, Piece, pieces_of
from composable.checkpoint.together import together
from composable.models.config import DecoderConfig
from composable.models.families import differences, from_hugging_face
from composable.models.init import decoder_init, initialise
from composable.moe.config import MoEConfig

_STACKS = {  # a stack of experts -> the dense weight that it comes from, and the dimension of an expert that G divides
    ".experts.gate_proj": (".gate_proj.weight", 0),
    ".experts.up_proj": (".up_proj.weight", 0),
    ".experts.down_proj": (".down_proj.weight", 1),
}
_GATE = ".mlp.gate.weight"
_STARTS = (".mlp.gate.bias", ".mlp.gate.e_score_correction_bias")  # not in a dense model: they stay as they start


def upcycle(
    folder: Folder | str, tensors: Mapping[str, Tensor], config: DecoderConfig, seed: int, *, verify: bool = True
) -> None:
    """Fill a model with experts from a dense checkpoint, so that it computes what the dense one does; collective.

    It does while no token is dropped and nothing is drawn in the router: to rounding.

    Args:
        folder: a checkpoint, or any safetensors folder of a dense model with our names.
        tensors: the model's parameters and buffers that this rank holds, by name; DTensors of any layout.
        config: of the model with experts; the dense one has the same sizes, and `moe.granularity` times `moe.ffn`.
        seed: of the initial weights, which the router gets; the same on all ranks.
        verify: check the checksums of a checkpoint.

    Raises:
        ValueError: what `check_upcycle` refuses, a dense model of other sizes, or what `load` refuses.
    """
    moe = check_upcycle(config)
    source = as_folder(folder)
    together(None, lambda: check_dense(source, config))
    loaded: dict[str, Tensor | Piece] = {}
    stacks: dict[str, Piece] = {}
    for name, tensor in tensors.items():
        if name.endswith(tuple(_STACKS)):
            stacks |= pieces_of({name: tensor})
        elif name.endswith(_GATE):
            _start_gate(name, pieces_of({name: tensor})[name], config, moe, seed)
        elif not name.endswith(_STARTS):
            loaded[name] = tensor
    for part in range(moe.granularity):
        # A load takes each name once. The first one asks for every tensor there is, and checks all of them.
        first = part == 0
        experts = _dense_pieces(stacks, moe, part)
        load(
            source,
            experts | loaded if first else experts,
            allow_extra=() if first else ("*",),
            allow_cast=True,
            verify=verify and first,
        )
    for name, piece in stacks.items():
        _finish_stack(name, piece, moe)


def check_upcycle(config: DecoderConfig) -> MoEConfig:
    """The experts of a configuration in which they can start from a dense model.

    Raises:
        ValueError: the first rule that it breaks.
    """
    moe = config.moe
    if moe is None:
        raise ValueError("model.moe is not set: a dense model starts from a dense checkpoint without upcycling")
    size = moe.granularity
    if not (moe.normalise or moe.score == "topk_softmax"):
        raise ValueError(
            f"moe.upcycle with moe.score={moe.score} and moe.normalise=False: a token's weights must sum to one for "
            "the output to be the dense model's; write moe.normalise=True"
        )
    if moe.shared_ffn:
        raise ValueError(
            f"moe.upcycle with moe.shared_ffn={moe.shared_ffn}: the routed experts alone give the dense output, and a "
            "shared one would add to it; write moe.shared_ffn=0"
        )
    if moe.expert_bias or moe.swiglu_limit or moe.fused:
        raise ValueError(
            f"moe.upcycle with moe.expert_bias={moe.expert_bias}, swiglu_limit={moe.swiglu_limit} and "
            f"fused={moe.fused}: each expert is a dense model's plain SwiGLU; write False, 0 and False"
        )
    if config.mlp_bias:
        raise ValueError("moe.upcycle with model.mlp_bias=True: experts have no biases; start from a model without")
    if size * moe.ffn != config.ffn:
        raise ValueError(
            f"moe.upcycle with moe.ffn={moe.ffn} and moe.granularity={size}: together they are the dense width "
            f"model.ffn={config.ffn}; write moe.ffn={config.ffn // size}"
            + ("" if config.ffn % size == 0 else f", and a granularity that divides {config.ffn}")
            + f", or model.ffn={size * moe.ffn} if that is the dense model's"
        )
    for name, value in (("top_k", moe.top_k), ("experts / moe.groups", moe.experts // moe.groups)):
        if value % size:
            raise ValueError(
                f"moe.{name}={value} with moe.granularity={size}: {size} experts make one copy of the dense SwiGLU "
                f"and are chosen together; write a multiple of {size}"
            )
    if size > 1 and (moe.exploration.noise != "none" or moe.exploration.expert_dropout):
        raise ValueError(
            f"moe.granularity={size} with moe.exploration.noise={moe.exploration.noise} and expert_dropout="
            f"{moe.exploration.expert_dropout}: they would tear apart the {size} experts of a copy from the first "
            "step; write none and 0, or moe.granularity=1"
        )
    return moe


def check_dense(folder: Folder, config: DecoderConfig) -> None:
    """Refuse a folder whose config.json is not that of the dense model; nothing if there is none.

    Raises:
        ValueError: a model that has experts already, or the fields that differ.
    """
    if not (folder / "config.json").is_file():
        return
    dense = from_hugging_face(json.loads((folder / "config.json").read_text()))
    if dense.moe is not None:
        raise ValueError(f"init_from={folder} has experts already; write model.moe.upcycle=False")
    if different := differences(dense, dataclasses.replace(config, moe=None)):
        raise ValueError(f"init_from={folder} is another model: {'; '.join(different)}")


def _dense_pieces(stacks: Mapping[str, Piece], moe: MoEConfig, part: int) -> dict[str, Tensor | Piece]:
    """Dense name -> the first expert here that is the part-th of its copy, as a piece of the dense tensor."""
    pieces: dict[str, Tensor | Piece] = {}
    for name, stack in stacks.items():
        here = _places(stack, moe, part)
        if here:
            dense, dim = _dense(name)
            shape, offsets = list(stack.shape[1:]), list(stack.box.offsets[1:])
            offsets[dim] += part * shape[dim]
            shape[dim] *= moe.granularity
            pieces[dense] = Piece(stack.local[here[0]], tuple(shape), Box(tuple(offsets), stack.box.sizes[1:]))
    return pieces


def _finish_stack(name: str, stack: Piece, moe: MoEConfig) -> None:
    """Copy what was loaded to the other experts here, and weigh what goes back into the residual stream."""
    with torch.no_grad():
        for part in range(moe.granularity):
            here = _places(stack, moe, part)
            for place in here[1:]:
                stack.local[place].copy_(stack.local[here[0]])
        if name.endswith(".down_proj"):
            # A token's weights sum to `scale`, and each copy that it takes counts once for each of its experts.
            stack.local.mul_(moe.granularity / moe.scale)


def _places(stack: Piece, moe: MoEConfig, part: int) -> range:
    """Places in the local stack of the experts that are the part-th of their copy."""
    return range((part - stack.box.offsets[0]) % moe.granularity, stack.box.sizes[0], moe.granularity)


def _dense(name: str) -> tuple[str, int]:
    for stack, (dense, dim) in _STACKS.items():
        if name.endswith(stack):
            return name.removesuffix(stack) + dense, dim
    raise KeyError(name)


def _start_gate(name: str, gate: Piece, config: DecoderConfig, moe: MoEConfig, seed: int) -> None:
    """The initial values of the first expert of each copy, for all of the copy: the same numbers in every layout."""
    whole = torch.empty(gate.shape, dtype=gate.local.dtype, device=gate.local.device)
    initialise([(name, whole)], decoder_init(config), seed)
    copies = whole[:: moe.granularity].repeat_interleave(moe.granularity, dim=0)
    with torch.no_grad():
        gate.local.copy_(copies[gate.box.slices()])
