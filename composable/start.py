"""A new run that starts from weights: of another run, or of a publisher."""

import dataclasses
import fnmatch
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from composable.checkpoint.format import Stored
from composable.checkpoint.listing import list_folder
from composable.checkpoint.load import load
from composable.checkpoint.quantised import (
    Logical,
    Quantised,
    fill_dequantised,
    quantisation_of,
    quantised_tensors,
    refuse_quantised,
)
from composable.checkpoint.remote import Folder
from composable.checkpoint.shards import Piece, pieces_of
from composable.checkpoint.together import together
from composable.models.config import DecoderConfig
from composable.models.families import differences, from_hugging_face, mtp_names, unread
from composable.models.names import in_file
from composable.models.upcycle import upcycle
from composable.parallel.compose import Composed
from composable.parallel.tied import copy_tied_weight
from composable.recipe import Recipe

ADDED = ("qk_norm", "qk_norm_wide", "qkv_bias", "output_bias", "mlp_bias", "sinks")
"""fields of a model that only add weights to it"""
ADDED_TO_ROUTER = ("correction", "router_bias", "expert_bias")
"""those of its experts"""
NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""dtypes in which a weight is its own value"""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def start_from(folder: Folder, recipe: Recipe, model: Composed) -> list[str]:
    """Fill the model with the weights of a checkpoint or Hugging Face folder, and say what was done; collective.

    A tied weight is read under the head's name where the embedding's is not there. Weights that the folder lacks are an
    error, but for those of `recipe.init_missing`, which keep their initial values. Quantised ones are an error too, or
    are dequantised with `recipe.init_dequantise`.

    Raises:
        ValueError: it is another model, or what `load` refuses.
    """
    moe, verify = recipe.model.moe, recipe.checkpoint.verify
    cast = f"cast to {recipe.dtype} where they differ"
    if moe is not None and moe.upcycle:
        upcycle(folder, model.saved, recipe.model, recipe.seed, verify=verify)
        copy_tied_weight(model.parts)
        return [f"{moe.experts} experts a layer, each {_share(moe.granularity)} dense one, of {folder}, {cast}"]
    together(None, lambda: check_same_model(folder, recipe.model, recipe.init_missing))
    tensors = in_file(model.saved, recipe.model)
    stored: dict[str, Logical] = {}

    def names() -> list[str]:
        stored.update(_stored(folder, dequantise=recipe.init_dequantise))
        return list(tensors)

    wanted = {name for names_of_rank in together(None, names) for name in names_of_rank}
    if recipe.model.tied and HEAD in stored:
        if EMBEDDING in stored:
            check_tied(folder, tensors)
            del stored[HEAD]
        else:
            tensors = {HEAD if name == EMBEDDING else name: tensor for name, tensor in tensors.items()}
            wanted = (wanted - {EMBEDDING}) | {HEAD}
    check_missing(folder, sorted(wanted - stored.keys()), recipe.init_missing)
    check_numbers(folder, [stored[name] for name in sorted(wanted & stored.keys())])
    packed = {name: found for name, found in stored.items() if isinstance(found, Quantised)}
    plain = {name: tensor for name, tensor in tensors.items() if name not in packed}
    load(folder, plain, allow_missing=recipe.init_missing, allow_extra=["*"], allow_cast=True, verify=verify)
    together(None, lambda: _dequantise(folder, packed, tensors))
    copy_tied_weight(model.parts)
    remarks = [f"weights of {folder}, {cast}"]
    if taken := sorted(packed.keys() & wanted):
        remarks.append(f"{len(taken)} tensors of {folder} were dequantised ({packed[taken[0]].method})")
    config = _config(folder) or {}
    if others := unread(config):
        remarks.append(f"warning: not read of {folder / 'config.json'}: {', '.join(others)}")
    extra = sorted(stored.keys() - wanted)
    if ahead := list(filter(mtp_names(config), extra)):  # not trained here
        remarks.append(f"notice: {_some(ahead)} of {folder} are for multi-token prediction and were left out")
    if extra := sorted(set(extra) - set(ahead)):
        remarks.append(f"warning: {_some(extra)} of {folder} are not of this model and were left out")
    if missing := sorted(wanted - stored.keys()):
        remarks.append(f"warning: {_some(missing)} are not in {folder} and keep their initial values")
    return remarks


def _stored(folder: Folder, *, dequantise: bool) -> dict[str, Logical]:
    """The weights of a folder as a model has them."""
    found = list_folder(folder, ["weights"]).tensors["weights"]
    if dequantise:
        return quantised_tensors(found, quantisation_of(folder))
    refuse_quantised(folder, found, "--init-dequantise")
    return dict(found)


def _dequantise(folder: Folder, packed: Mapping[str, Quantised], tensors: Mapping[str, Tensor | Piece]) -> None:
    """Fill those of this rank's tensors that are stored quantised."""
    for name, piece in pieces_of({name: tensor for name, tensor in tensors.items() if name in packed}).items():
        fill_dequantised(folder, packed[name], piece)


def check_same_model(folder: Folder, model: DecoderConfig, missing: Iterable[str] = ()) -> None:
    """Refuse weights of a model that computes otherwise, by the config.json beside them; nothing if there is none.

    Args:
        missing: patterns of weights that the folder may lack; with any, the model may have more kinds of weights.

    Raises:
        ValueError: the fields that differ, what they are there and what they are here.
    """
    config = _config(folder)
    if config is None:
        return
    theirs = from_hugging_face(config)
    added: dict[str, Any] = {name: True for name in ADDED if getattr(model, name) and model.latent == theirs.latent}
    grown = dataclasses.replace(theirs, **added)
    if grown.moe is not None and model.moe is not None:
        more: dict[str, Any] = {name: True for name in ADDED_TO_ROUTER if getattr(model.moe, name)}
        grown = dataclasses.replace(grown, moe=dataclasses.replace(grown.moe, **more))
    if different := differences(grown if missing else theirs, model):
        adds = not missing and not differences(grown, model)
        hint = "; name the weights that this adds as --init-missing" if adds else "; --init-model trains that one"
        raise ValueError(f"init_from={folder} is another model: {'; '.join(different)}{hint}")


def _config(folder: Folder) -> dict[str, Any] | None:
    """The content of the config.json beside weights, if there is one."""
    path = folder / "config.json"
    return json.loads(path.read_text()) if path.is_file() else None


def check_missing(folder: Folder, names: Sequence[str], allowed: Iterable[str]) -> None:
    """Refuse a folder without the weights `names`, but for those of the patterns `allowed`.

    Raises:
        ValueError: which they are, and how they are allowed.
    """
    patterns = tuple(allowed)
    if lacking := [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]:
        raise ValueError(
            f"init_from={folder} lacks {_some(lacking)}; to start these from their initial values, name them as "
            "--init-missing (also by patterns, '*.q_norm.weight')"
        )


def check_numbers(folder: Folder, tensors: Iterable[Logical]) -> None:
    """Refuse weights that are no numbers by themselves, in whatever form something else scales them.

    Raises:
        ValueError: which one, and its dtype.
    """
    for tensor in tensors:
        if isinstance(tensor, Stored) and tensor.spec.dtype not in NUMBERS:
            raise ValueError(
                f"{tensor.spec.name} is {tensor.spec.dtype} in init_from={folder}: such weights are quantised, and "
                "nothing there says how in a form that is read here; start from weights in 16 bits or more"
            )


def check_tied(folder: Folder, tensors: dict[str, Tensor | Piece]) -> None:
    """Refuse a folder that holds a tied weight under both of its names with other values; collective.

    Raises:
        ValueError: they differ.
    """
    held = pieces_of({EMBEDDING: tensors[EMBEDDING]}) if EMBEDDING in tensors else {}
    two = {
        name: Piece(torch.empty_like(piece.local), piece.shape, piece.box)
        for piece in held.values()
        for name in (EMBEDDING, HEAD)
    }
    load(folder, two, allow_extra=["*"], allow_cast=True, verify=False)

    def compare() -> None:
        if held and not torch.equal(two[EMBEDDING].local, two[HEAD].local):
            raise ValueError(
                f"{EMBEDDING} and {HEAD} of {folder} differ, and this model has one weight for both; write "
                "model.tied=False"
            )

    together(None, compare)


def _share(granularity: int) -> str:
    return "a copy of the" if granularity == 1 else f"1/{granularity} of the"


def _some(names: Sequence[str]) -> str:
    return f"{len(names)} tensors ({', '.join(names[:10])}{', ...' if len(names) > 10 else ''})"
