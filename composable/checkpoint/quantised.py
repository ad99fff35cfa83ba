"""Weights that were published in blocks of few bits with a scale each, read as ordinary numbers.

Two forms are known, told apart by `quantization_config.quant_method` of config.json:

* `fp8` (DeepSeek-V3, arXiv:2412.19437, section 3.3.2): `X` of float8_e4m3fn [R, C] with `X_scale_inv`, one number for
  each block of 128 x 128 (`weight_block_size`), the last ones cut off at the border. Values are X times their scale.
* `mxfp4` (OCP Microscaling Formats 1.0, as gpt-oss has it): `X_blocks` uint8 [E, O, G, 16] are 32 numbers of four bits
  (E2M1, the low half of a byte first) for each of G groups along the inputs, `X_scales` uint8 [E, O, G] the exponent of
  their power of two, plus 127. X is [E, I, O] with I = 32 G: transposed, as such a model has its weights.

A product is made in float32 and then rounded to the dtype that was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composable.checkpoint.format import Stored
from composable.checkpoint.region import read_region
from composable.checkpoint.remote import Folder
from composable.checkpoint.shards import Box, Piece, chunk_boxes

CHUNK = 4 << 20  # elements that are decoded at a time: 16 MiB in float32
EXPONENT_BIAS = 127
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
GROUP = 32  # numbers of MXFP4 that share a scale, in 16 bytes
_MXFP4 = ("_blocks", "_scales")
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

Decode = Callable[[Folder, Box, Tensor], None]
"""(folder, box of the dequantised tensor, where its values go: of the box's sizes, any strides and float dtype)"""


@dataclass(frozen=True)
class Quantised:
    """A tensor that several stored ones make up."""

    name: str
    shape: tuple[int, ...]
    """dequantised"""
    method: str
    """`fp8` or `mxfp4`"""
    stored: tuple[Stored, ...]
    """values and scales: what is read"""
    decode: Decode

    @property
    def nbytes(self) -> int:
        """What is stored of it, in bytes."""
        return sum(tensor.spec.nbytes for tensor in self.stored)


Logical = Stored | Quantised


def quantisation_of(folder: Folder) -> Mapping[str, Any]:
    """What config.json says of quantised weights beside it: empty if nothing, or there is none."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    config = json.loads(path.read_text())
    return config.get("quantization_config") or {} if isinstance(config, dict) else {}


def quantised_tensors(tensors: Mapping[str, Stored], quantisation: Mapping[str, Any]) -> dict[str, Logical]:
    """The tensors of a folder as a model has them, in their order: what is not quantised as it is stored.

    Args:
        tensors: of the folder, by name (`listing.list_folder`).
        quantisation: what `quantisation_of` gives. Empty: the form is told by the names.

    Raises:
        ValueError: a form that is not known; values without scales, or the other way round; scales that do not fit.
    """
    method = _method(tensors, quantisation)
    return _FORMS[method](tensors, quantisation) if method else dict(tensors)


def refuse_quantised(folder: Folder, tensors: Mapping[str, Stored], option: str) -> None:
    """Refuse a folder of quantised weights where they are not to be dequantised.

    Args:
        option: what to write for them to be.

    Raises:
        ValueError: which quantisation it is, and the option.
    """
    if method := _method(tensors, quantisation_of(folder)):
        raise ValueError(f"the weights in {folder} are quantised ({method}); write {option} to read them dequantised")


def read_dequantised(folder: Folder, tensor: Quantised, box: Box, dtype: torch.dtype) -> Tensor:
    """The values of a box of a tensor, contiguous, of the shape `box.sizes`.

    Takes the memory of the result, what is stored of 4 million elements, and 64 MiB at most. Of mxfp4, whole matrices
    [1, I, O] are the boxes that read fastest; a few rows of one read far more than their part.
    """
    values = torch.empty(box.sizes, dtype=dtype)
    tensor.decode(folder, box, values)
    return values


def fill_dequantised(folder: Folder, tensor: Quantised, piece: Piece) -> None:
    """Fill a rank's part of a tensor, of any strides, on any device.

    Raises:
        ValueError: the piece is of a tensor of another shape.
    """
    if piece.shape != tensor.shape:
        raise ValueError(f"{tensor.name} has shape {tensor.shape} in {folder}, {piece.shape} is asked for")
    if piece.box.numel:
        tensor.decode(folder, piece.box, piece.local)


def _method(tensors: Mapping[str, Stored], quantisation: Mapping[str, Any]) -> str:
    """The form of the weights, as config.json or else their names tell it; empty: they are ordinary numbers.

    What config.json tells is nothing where no tensor is of that form: somebody has dequantised them before.
    """
    if not isinstance(quantisation, Mapping):
        raise ValueError(f"config.json: quantization_config={quantisation!r} is no JSON object")
    told = quantisation.get("quant_method") or ""
    if told and told not in tuple(_FORMS):
        raise ValueError(f"quantization_config.quant_method={told!r} cannot be dequantised; {' and '.join(_FORMS)} can")
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv") or (told == "fp8" and tensor.spec.dtype in FLOAT8):
            return "fp8"
        packed = name.removesuffix("_blocks")
        if (packed != name and f"{packed}_scales" in tensors) or (told == "mxfp4" and name.endswith(_MXFP4)):
            return "mxfp4"
    return ""


def _fp8(tensors: Mapping[str, Stored], quantisation: Mapping[str, Any]) -> dict[str, Logical]:
    block = quantisation.get("weight_block_size") or (128, 128)
    if not isinstance(block, Sequence) or any(type(step) is not int or step < 1 for step in block):
        raise ValueError(f"config.json: weight_block_size={block!r}; it is two positive whole numbers, as [128, 128]")
    block = tuple(block)
    out: dict[str, Logical] = {}
    for name, tensor in tensors.items():
        scales = tensors.get(f"{name}_scale_inv")
        if name.endswith("_scale_inv"):
            _check_pair(name, name.removesuffix("_scale_inv"), tensors)
        elif tensor.spec.dtype not in FLOAT8:
            out[name] = tensor
        elif scales is None:
            raise ValueError(f"{name} is {tensor.spec.dtype} and has no {name}_scale_inv beside it: a file is missing")
        else:
            shape = tensor.spec.shape
            grid = tuple(-(-size // step) for size, step in zip(shape, block, strict=False))
            if len(shape) != len(block) or scales.spec.shape != grid:
                raise ValueError(
                    f"{name}_scale_inv has shape {scales.spec.shape}: blocks of {block} of {name} {shape} have scales "
                    f"of shape {grid}"
                )
            decode = partial(_decode_fp8, tensor, scales, block)
            out[name] = Quantised(name, shape, "fp8", (tensor, scales), decode)
    return out


def _mxfp4(tensors: Mapping[str, Stored], quantisation: Mapping[str, Any]) -> dict[str, Logical]:
    out: dict[str, Logical] = {}
    for stored_name, tensor in tensors.items():
        name = stored_name.removesuffix("_blocks")
        if stored_name.endswith("_scales"):
            _check_pair(stored_name, f"{stored_name.removesuffix('_scales')}_blocks", tensors)
        elif name == stored_name:
            out[name] = tensor
        else:
            _check_pair(stored_name, f"{name}_scales", tensors)
            scales, shape = tensors[f"{name}_scales"], tensor.spec.shape
            if len(shape) != 4 or shape[3] != GROUP // 2 or scales.spec.shape != shape[:3]:
                raise ValueError(
                    f"{stored_name} has shape {shape} and {name}_scales {scales.spec.shape}: they are [experts, "
                    f"outputs, groups, {GROUP // 2}] and [experts, outputs, groups]"
                )
            experts, outputs, groups, _ = shape
            decode = partial(_decode_mxfp4, tensor, scales)
            out[name] = Quantised(name, (experts, groups * GROUP, outputs), "mxfp4", (tensor, scales), decode)
    return out


_FORMS: Mapping[str, Callable[[Mapping[str, Stored], Mapping[str, Any]], dict[str, Logical]]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}


def _check_pair(name: str, other: str, tensors: Mapping[str, Stored]) -> None:
    if other not in tensors:
        raise ValueError(f"{name} stands without {other}: a file is missing")


def _decode_fp8(values: Stored, scales: Stored, block: tuple[int, int], folder: Folder, box: Box, out: Tensor) -> None:
    for part in chunk_boxes(box, 1, CHUNK):
        first = [offset // step for offset, step in zip(part.offsets, block, strict=True)]
        last = [-(-(o + n) // step) for o, n, step in zip(part.offsets, part.sizes, block, strict=True)]
        grid = Box(tuple(first), tuple(b - a for a, b in zip(first, last, strict=True)))
        factors = read_region(folder, scales, grid).to(torch.float32)
        for dim, step in enumerate(block):  # the block of each row, and of each column
            index = torch.arange(part.offsets[dim], part.offsets[dim] + part.sizes[dim]) // step - first[dim]
            factors = factors.index_select(dim, index)
        decoded = read_region(folder, values, part).to(torch.float32).mul_(factors)
        out[part.slices(box.offsets)].copy_(decoded)


def _decode_mxfp4(blocks: Stored, scales: Stored, folder: Folder, box: Box, out: Tensor) -> None:
    start, stop = box.offsets[1], box.offsets[1] + box.sizes[1]
    groups = start // GROUP, -(-stop // GROUP)
    width = groups[1] - groups[0]
    # As it is stored, [E, O, G]: a part has all groups that are asked for, so that rows are read in long runs.
    wanted = Box((box.offsets[0], box.offsets[2], groups[0]), (box.sizes[0], box.sizes[2], width))
    table = torch.tensor([(E2M1[byte & 15], E2M1[byte >> 4]) for byte in range(256)])  # [256, 2]
    for part in chunk_boxes(wanted, GROUP, CHUNK):
        stored = Box((*part.offsets, 0), (*part.sizes, GROUP // 2))
        packed = read_region(folder, blocks, stored).view(-1).to(torch.int32)
        exponents = read_region(folder, scales, part).to(torch.int32).sub_(EXPONENT_BIAS)
        decoded = torch.ldexp(table.index_select(0, packed).view(*part.sizes, GROUP), exponents[..., None])
        # The inputs of this part's groups, and of these those that the box has.
        first = part.offsets[2] * GROUP
        low, high = max(start - first, 0), min(stop - first, part.sizes[2] * GROUP)
        place = Box((part.offsets[0], first + low, part.offsets[1]), (part.sizes[0], high - low, part.sizes[1]))
        out[place.slices(box.offsets)].copy_(decoded.flatten(2)[..., low:high].mT)
