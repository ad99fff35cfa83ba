"""Hugging Face folders: safetensors in one file or several (our checkpoints are such), and `pytorch_model*.bin`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from composable.checkpoint import folder as folders
from composable.checkpoint.format import Stored, TensorSpec
from composable.checkpoint.formats.source import Entry, Source, Target, check_dtypes, computed_entry, stored_entries
from composable.checkpoint.formats.state_dict import arranged, leaves
from composable.checkpoint.formats.torch_file import loaded
from composable.checkpoint.listing import list_folder
from composable.checkpoint.plan import SECTIONS, Table, plan_sections
from composable.checkpoint.quantised import Logical, Quantised, quantised_tensors, read_dequantised
from composable.checkpoint.remote import Folder
from composable.checkpoint.rewrite import small_files, write_units
from composable.checkpoint.save import finish
from composable.checkpoint.shards import Box, full_box

BIN, BIN_INDEX = "pytorch_model*.bin", "pytorch_model.bin.index.json"
QUANTISED = 80 << 20
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def source(folder: Folder, *, weights_only: bool = False) -> Source:
    """A checkpoint, or another folder of safetensors files; raises what `list_folder` raises."""
    listing = list_folder(folder, ["weights"] if weights_only else ["weights", "optimizer"])
    manifest = listing.manifest
    sections = {
        section: stored_entries(folder, tensors, manifest.checksums.get(section) if manifest else None)
        for section, tensors in listing.tensors.items()
    }
    sections.setdefault("optimizer", {})
    kind = "a checkpoint of ours" if manifest else "a Hugging Face folder of safetensors files"
    return Source(kind, sections, small_files(folder, manifest))


def source_bin(folder: Path) -> Source:
    """A folder of `pytorch_model*.bin` files.

    Raises:
        ValueError: naming the file, for one that is missing or holds what is no state dict; a name in two files.
    """
    index = folder / BIN_INDEX
    try:
        weight_map = dict(json.loads(index.read_bytes())["weight_map"]) if index.is_file() else {}
        for file in weight_map.values():
            folders.check_inside(file)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is not an index of files: {error!r}") from error
    files = sorted(set(weight_map.values())) or sorted(path.name for path in folder.glob(BIN))
    weights: dict[str, Entry] = {}
    notes: list[str] = []
    for file in files:
        if not (folder / file).is_file():
            raise ValueError(f"{folder / file} is missing, {index} names it; copy the folder again")
        sections, left = arranged(list(leaves(loaded(folder, file))), weights_only=True)
        notes += left
        if twice := sorted(weights.keys() & sections["weights"].keys()):
            raise ValueError(f"{twice[0]} stands in two files of {folder}, one of them {file}; remove one")
        weights |= sections["weights"]
    if missing := sorted(weight_map.keys() - weights.keys()):
        raise ValueError(
            f"{index} says that {missing[0]} is in {weight_map[missing[0]]}, it is not; copy the folder again"
        )
    kind = f"a Hugging Face folder of {BIN} files"
    return Source(kind, {"weights": weights, "optimizer": {}}, small_files(folder, None), tuple(notes))


def dequantised(folder: Folder, found: Source, dtype: torch.dtype) -> Source:
    """The same with weights of `dtype` in the place of those that are quantised in blocks (`quantised.py`).

    Holds no more than `QUANTISED` bytes on a thread beside its chunk. Checksums of what is dequantised are not checked.

    Raises:
        ValueError: there are none, or `quantised_tensors` does not know the form.
    """
    weights: dict[str, Entry] = {}
    for name, tensor in logical(found).items():
        if isinstance(tensor, Stored):
            weights[name] = found.sections["weights"][name]
            continue
        places = [place for stored in tensor.stored for place in stored.places]
        read = partial(_read, folder, tensor, dtype)
        weights[name] = computed_entry(TensorSpec(name, dtype, tensor.shape), read, places)
    if weights.keys() == found.sections["weights"].keys():
        raise ValueError(f"{folder} holds no quantised weights; leave out --dequantise")
    found = replace(found, sections={**found.sections, "weights": weights})
    config = {key: value for key, value in found.config.items() if key != "quantization_config"}
    return found.with_config(config) if config else found


def logical(found: Source) -> dict[str, Logical]:
    """The weights as a model has them: several tensors that make up a quantised one as that one."""
    tensors = {name: Stored(entry.spec, entry.places) for name, entry in found.sections["weights"].items()}
    return quantised_tensors(tensors, found.config.get("quantization_config") or {})


def _read(folder: Folder, tensor: Quantised, dtype: torch.dtype, box: Box) -> Tensor:
    return read_dequantised(folder, tensor, box, dtype)


def target(found: Source, max_file_size: int) -> Target:
    """A checkpoint: a Hugging Face folder in files of at most `max_file_size` bytes, with checksums.

    A tied embedding stands once. Raises ValueError for a dtype that safetensors lacks.
    """
    sections = {name: dict(found.sections[name]) for name in SECTIONS}
    weights = sections["weights"]
    if found.config.get("tie_word_embeddings") and HEAD in weights and EMBEDDING in weights:
        head, embedding = (
            [(p.file, p.offset, p.spec.shape) for p in weights[name].places] for name in (HEAD, EMBEDDING)
        )
        if head == embedding:
            del weights[HEAD]
    check_dtypes(found)
    table: Table = {
        section: {name: (e.spec.dtype, e.spec.shape, full_box(e.spec.shape)) for name, e in entries.items()}
        for section, entries in sections.items()
    }
    plans = plan_sections([table], max_file_size)
    names = tuple((f"{plan.folder}/{file.name}".lstrip("/"), file.size) for plan in plans for file in plan.files)

    def write(draft: Path, chunk: int, advance: Callable[[int], object]) -> None:
        checksums: list[tuple[str, str, Box, str]] = []
        for plan in plans:
            entries = sections[plan.name]
            units = [unit for entry in entries.values() for unit in entry.units(chunk)]
            written = write_units(
                draft / plan.folder,
                plan.files,
                units,
                lambda unit, entries=entries: entries[unit.name].values(unit, chunk),  # type: ignore[misc]
                advance,
            )
            checksums += [(plan.name, *entry) for entry in written]
        finish(draft, plans, found.small, [checksums])

    return Target(names, found.small, write)
