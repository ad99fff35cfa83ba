"""A new run that starts from weights: of another run, or of a publisher."""

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from composable.checkpoint.listing import list_folder
from composable.checkpoint.load import load
from composable.checkpoint.remote import Folder
from composable.checkpoint.shards import Piece, pieces_of
from composable.checkpoint.together import together
from composable.models.config import DecoderConfig
from composable.models.families import differences, from_hugging_face
from composable.models.names import in_file
from composable.models.upcycle import upcycle
from composable.parallel.compose import Composed
from composable.parallel.tied import copy_tied_weight
from composable.recipe import Recipe

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def start_from(folder: Folder, recipe: Recipe, model: Composed) -> list[str]:
    """Fill the model with the weights of a checkpoint or Hugging Face folder, and say what was done; collective.

    A tied weight is read under the head's name where the embedding's is not there. Weights that the folder lacks are an
    error, but for those of `recipe.init_missing`, which keep their initial values.

    Raises:
        ValueError: it is another model, or what `load` refuses.
    """
    moe, verify = recipe.model.moe, recipe.checkpoint.verify
    cast = f"cast to {recipe.dtype} where they differ"
    if moe is not None and moe.upcycle:
        upcycle(folder, model.saved, recipe.model, recipe.seed, verify=verify)
        copy_tied_weight(model.parts)
        return [f"{moe.experts} experts a layer, each {_share(moe.granularity)} dense one, of {folder}, {cast}"]
    together(None, lambda: check_same_model(folder, recipe.model))
    tensors = in_file(model.saved, recipe.model)
    stored: set[str] = set()

    def names() -> list[str]:
        stored.update(list_folder(folder, ["weights"]).tensors["weights"])
        return list(tensors)

    wanted = {name for names_of_rank in together(None, names) for name in names_of_rank}
    if recipe.model.tied and HEAD in stored:
        if EMBEDDING in stored:
            check_tied(folder, tensors)
            stored.discard(HEAD)
        else:
            tensors = {HEAD if name == EMBEDDING else name: tensor for name, tensor in tensors.items()}
            wanted = (wanted - {EMBEDDING}) | {HEAD}
    load(folder, tensors, allow_missing=recipe.init_missing, allow_extra=["*"], allow_cast=True, verify=verify)
    copy_tied_weight(model.parts)
    remarks = [f"weights of {folder}, {cast}"]
    if extra := sorted(stored - wanted):
        remarks.append(f"warning: {_some(extra)} of {folder} are not of this model and were left out")
    if missing := sorted(wanted - stored):
        remarks.append(f"warning: {_some(missing)} are not in {folder} and keep their initial values")
    return remarks


def check_same_model(folder: Folder, model: DecoderConfig) -> None:
    """Refuse weights of a model that computes otherwise, by the config.json beside them; nothing if there is none.

    Raises:
        ValueError: the fields that differ, what they are there and what they are here.
    """
    if not (folder / "config.json").is_file():
        return
    theirs = from_hugging_face(json.loads((folder / "config.json").read_text()))
    if different := differences(theirs, model):
        raise ValueError(f"init_from={folder} is another model: {'; '.join(different)}")


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
