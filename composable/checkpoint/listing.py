"""What a folder of safetensors files holds: from headers, indices and manifest, before any tensor is read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from composable.checkpoint import folder as folders
from composable.checkpoint.for_ranks import layout_files
from composable.checkpoint.format import Place, Stored, TensorSpec, read_header
from composable.checkpoint.owners import check_cover
from composable.checkpoint.plan import SECTIONS
from composable.checkpoint.remote import Folder, as_folder
from composable.checkpoint.shards import Box


@dataclass(frozen=True)
class Listing:
    """What a folder holds: section (`weights`, `optimizer`) -> name -> tensor, and the manifest if it has one.

    A place's file is relative to the folder.
    """

    tensors: Mapping[str, Mapping[str, Stored]]
    manifest: folders.Manifest | None


def list_folder(folder: Folder | str, sections: Sequence[str] = tuple(SECTIONS)) -> Listing:
    """The tensors of a checkpoint or of a plain safetensors folder, from the files' headers; no tensor is read.

    Also those of a folder of files for ranks (`for_ranks.py`): of what stands in several files, one copy.

    Raises ValueError that names the file for an incomplete checkpoint, a missing or truncated file, a name that stands
    in two files or not where the index says, and parts that do not make up a tensor; FileNotFoundError where there are
    no weights.
    """
    folder = as_folder(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    manifest = folders.read_manifest(folder)
    if manifest:
        folders.check_files(folder, manifest)
    return Listing({section: _list_section(folder, *SECTIONS[section]) for section in sections}, manifest)


def _list_section(folder: Folder, subfolder: str, prefix: str) -> dict[str, Stored]:
    base = folder / subfolder
    if not subfolder and (for_ranks := layout_files(folder)):
        return _assembled(base, _once(place for file in for_ranks for place in read_header(base / file, file).values()))
    indices: list[Folder] = sorted(base.glob("*.safetensors.index.json"), key=str)
    preferred = base / f"{prefix}.safetensors.index.json"
    index = preferred if preferred in indices else indices[0] if len(indices) == 1 else None
    weight_map = _weight_map(index) if index else {}
    whole = base / f"{prefix}.safetensors"
    if index:
        files = sorted(set(weight_map.values()))
    elif whole.is_file():
        files = [whole.name]
    else:
        files = sorted(path.name for path in base.glob("*.safetensors"))
    if not files and (not index or not subfolder):
        if subfolder:
            return {}
        raise FileNotFoundError(
            f"{folder} holds no safetensors files" + (f" that {index} names" if index else "") + _instead(folder)
        )
    places: dict[str, Place] = {}
    for file in files:
        if not (base / file).is_file():
            raise ValueError(f"{base / file} is missing, {index} names it; copy the folder again")
        for name, place in read_header(base / file, os.path.join(subfolder, file)).items():
            if name in places:
                raise ValueError(
                    f"{name} stands in two files of {base}: {places[name].file} and {place.file}; remove one"
                )
            places[name] = place
    for name, file in weight_map.items():
        if name not in places or places[name].file != os.path.join(subfolder, file):
            raise ValueError(f"{index} says that {name} is in {file}, it is not; write the index anew or remove it")
    return _assembled(base, places.values())


def _instead(folder: Folder) -> str:
    """What may have been meant by a folder without safetensors files."""
    if newest := next((found for run in (folder / "checkpoints", folder) if (found := folders.latest(run))), None):
        return f"; the newest checkpoint below it is {newest}"
    if any(path.name == ".metadata" or path.name.endswith((".pt", ".pth", ".bin")) for path in folder.iterdir()):
        return "; tools/convert.py --to composable makes some of DCP, torch.save and Meta's files"
    return ""


def _once(places: Iterable[Place]) -> Iterable[Place]:
    """Of the places of one part the first."""
    found: dict[tuple[str, Box], Place] = {}
    for place in places:
        found.setdefault((place.name, place.box), place)
    return found.values()


def _weight_map(index: Folder) -> dict[str, str]:
    try:
        weight_map = dict(json.loads(index.read_bytes())["weight_map"])
        for file in weight_map.values():
            folders.check_inside(file)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is not an index of safetensors files: {error!r}") from error
    return weight_map


def _assembled(base: Folder, places: Iterable[Place]) -> dict[str, Stored]:
    """The tensors that whole entries and parts make up; ValueError names one that they do not cover once."""
    of_name: dict[str, list[Place]] = {}
    for place in places:
        of_name.setdefault(place.name, []).append(place)
    tensors = {}
    for name, found in of_name.items():
        first = found[0]
        spec = TensorSpec(name, first.spec.dtype, first.part.shape if first.part else first.spec.shape)
        alike = all(
            p.spec.dtype == spec.dtype and (p.part.shape if p.part else p.spec.shape) == spec.shape for p in found
        )
        try:
            if not alike:
                raise ValueError("they are parts of tensors of several shapes or dtypes")
            check_cover(spec, [place.box for place in found])
        except ValueError as error:
            files = ", ".join(sorted({place.file for place in found}))
            raise ValueError(
                f"the parts of {name} in {base} ({files}) do not make up the tensor: a file is missing, or is another "
                f"checkpoint's ({error})"
            ) from error
        tensors[name] = Stored(spec, tuple(found))
    return tensors
