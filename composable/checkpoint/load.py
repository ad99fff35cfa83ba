"""Loading: each rank reads the byte ranges that its own layout needs, whatever layout wrote them."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from composable.checkpoint import folder as folders
from composable.checkpoint.format import Place, Stored
from composable.checkpoint.listing import Listing, list_folder
from composable.checkpoint.owners import LARGE, least_loaded
from composable.checkpoint.plan import Table, table_of
from composable.checkpoint.remote import Folder, as_folder
from composable.checkpoint.shards import Box, Piece, chunk_boxes, pieces_of
from composable.checkpoint.storage import naming, opened_files
from composable.checkpoint.together import rank_of, together
from composable.checkpoint.transfer import hash_file, hash_memory, read_and_hash, read_box, run_all


def load(
    folder: Folder | str,
    weights: Mapping[str, Tensor | Piece],
    optimizer: Mapping[str, Tensor | Piece] | None = None,
    *,
    allow_missing: Iterable[str] = (),
    allow_extra: Iterable[str] = (),
    allow_cast: bool = False,
    verify: bool = True,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill the given tensors in place from a checkpoint or any safetensors folder, or the URL of one; collective.

    Each rank gives the tensors that it holds (plain, DTensor or `Piece`; any layout, any strides, any device). Without
    `optimizer` the optimizer's files are not looked at. All ranks together must ask for exactly the names in the
    folder: the patterns `allow_missing` (asked for, not in the folder: left as they are) and `allow_extra` (in the
    folder, not asked for) lift that by name or wildcard. A cast that keeps every value is made; any other needs
    `allow_cast`. `verify` checks the checksums of all boxes, each by one rank, and of the small files; a plain folder
    has none.

    Raises ValueError on all ranks: for an incomplete checkpoint, a missing, truncated or changed file (naming it),
    missing and extra names, shapes that differ, a cast that loses values, a checksum that does not match (some
    tensors are filled by then). FileNotFoundError where the folder holds no safetensors at all.
    """
    folder = as_folder(folder)
    pieces: dict[str, dict[str, Piece]] = {}
    listings: list[Listing] = []

    def describe() -> Table:
        for section, tensors in (("weights", weights), ("optimizer", optimizer)):
            if tensors is not None:
                pieces[section] = pieces_of(tensors)
        listings.append(list_folder(folder, list(pieces)))
        return table_of(pieces)

    tables = together(group, describe)
    listing = listings[0]
    loading = _Loading(folder, listing, tables, pieces, rank_of(group))

    def fill() -> list[int]:
        _check(folder, listing, tables, tuple(allow_missing), tuple(allow_extra), allow_cast)
        if verify and listing.manifest:
            loading.saved = _saved_boxes(folder, listing, listing.manifest, tables)
            if loading.rank == 0:
                folders.check_content(folder, listing.manifest)
        return loading.fill()

    checked = {number for numbers in together(group, fill) for number in numbers}
    if loading.saved:
        together(group, lambda: loading.check_files(checked))


@dataclass(frozen=True)
class _Saved:
    """A box of a tensor as it was saved, and the xxh3_64 of its bytes."""

    place: Place
    section: str
    box: Box
    digest: str

    @property
    def key(self) -> tuple[str, Place, Box]:
        """The section, the place in a file, and the box as the place counts."""
        return self.section, self.place, self.box.within(self.place.box)


@dataclass
class _Loading:
    """What one rank reads and checks: each of the `saved` boxes, which are in the same order on every rank, is checked
    once, by a rank that loads it whole, else in the file, shared out evenly."""

    folder: Folder
    listing: Listing
    tables: Sequence[Table]
    pieces: Mapping[str, Mapping[str, Piece]]
    rank: int
    saved: Sequence[_Saved] = ()

    def fill(self) -> list[int]:
        """Read all pieces; returns the numbers of the saved boxes that this rank has checked, in its memory."""
        mine = _loaded_whole(self.saved, self.tables, self.rank)
        left = {self.saved[number].key: number for number in mine}

        def read(section: str, place: Place, piece: Piece, box: Box, shared: bool) -> None:
            number = left.pop((section, place, box), None)
            with naming(self.folder / place.file):
                if number is None:
                    read_box(opens[place.file], place, piece, box, shared)
                    return
                found = read_and_hash(opens[place.file], place, piece, box, shared)
            self._compare(number, found)

        def check(number: int) -> None:
            each = self.saved[number]
            self._compare(number, hash_memory(self.pieces[each.section][each.place.name], each.box))

        tasks = list(self._tasks())
        with opened_files(self.folder, {place.file for _, place, *_ in tasks}) as opens:
            run_all(read, tasks)
        run_all(check, [(number,) for number in left.values()])  # what was not read as it was saved
        return mine

    def _tasks(self) -> Iterator[tuple[str, Place, Piece, Box, bool]]:
        """Section, place, what lies there of a piece, its box that is read as one, whether other ranks read it too."""
        sharing = _sharing(self.tables, self.rank)
        for section, tensors in self.pieces.items():
            for name, piece in tensors.items():
                stored = self.listing.tensors[section].get(name)
                for place in stored.places if stored else ():
                    for target in _targets(piece, place):
                        for box in chunk_boxes(target.box, piece.local.element_size(), LARGE):
                            yield section, place, target, box, sharing[section, name][1] > 1

    def check_files(self, checked: Collection[int]) -> None:
        """Check this rank's share of what no rank has whole in its memory."""
        rest = [number for number in range(len(self.saved)) if number not in checked]
        sizes = [self.saved[n].box.numel * self.saved[n].place.spec.dtype.itemsize for n in rest]
        owners = least_loaded(sizes, len(self.tables))
        mine = [number for number, owner in zip(rest, owners, strict=True) if owner == self.rank]

        def check(number: int) -> None:
            place, box = self.saved[number].place, self.saved[number].box
            with naming(self.folder / place.file):
                found = hash_file(opens[place.file], place, box.within(place.box))
            self._compare(number, found)

        with opened_files(self.folder, {self.saved[number].place.file for number in mine}) as opens:
            run_all(check, [(number,) for number in mine])

    def _compare(self, number: int, found: str) -> None:
        each = self.saved[number]
        if found != each.digest:
            raise ValueError(
                f"{self.folder / each.place.file}: the bytes of {each.place.name}, {each.box}, were changed since they "
                "were saved: their checksum does not match; use another checkpoint"
            )


def _targets(piece: Piece, place: Place) -> Iterable[Piece]:
    """What of a piece lies at this place, if anything does, as a piece of the entry there."""
    common = piece.box.overlap(place.box)
    if common.numel:
        yield Piece(piece.local[common.slices(piece.box.offsets)], place.spec.shape, common.within(place.box))


def _check(
    folder: Folder,
    listing: Listing,
    tables: Sequence[Table],
    allow_missing: Sequence[str],
    allow_extra: Sequence[str],
    allow_cast: bool,
) -> None:
    """Names, shapes and casts, from what all ranks ask for: so every rank comes to the same result."""
    for section, tensors in listing.tensors.items():
        wanted = {name for table in tables for name in table[section]}
        missing = [name for name in sorted(wanted - tensors.keys()) if not _matches(name, allow_missing)]
        extra = [name for name in sorted(tensors.keys() - wanted) if not _matches(name, allow_extra)]
        if missing or extra:
            raise ValueError(
                f"the {section} in {folder} are not the ones asked for: {_some('missing there', missing)}, "
                f"{_some('not asked for', extra)}; allow_missing and allow_extra take names or patterns"
            )
        asked = {
            (name, dtype, shape): tensors[name]
            for table in tables
            for name, (dtype, shape, _) in table[section].items()
            if name in tensors
        }
        if shapes := [
            f"{name} has shape {found.spec.shape} in {folder / found.places[0].file}, {shape} is asked for"
            for (name, _, shape), found in asked.items()
            if found.spec.shape != shape
        ]:
            raise ValueError("; ".join(shapes[:10] + ["..."] * (len(shapes) > 10)))
        for (name, dtype, _), found in asked.items():
            if not allow_cast and not widens(found.spec.dtype, dtype):
                raise ValueError(
                    f"{name} is {found.spec.dtype} in {folder / found.places[0].file}: {dtype} does not hold all its "
                    "values; pass allow_cast=True to round"
                )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(name == pattern or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _some(text: str, names: Sequence[str]) -> str:
    return f"{len(names)} {text}" + (f" ({', '.join(names[:10])}{', ...' if len(names) > 10 else ''})" if names else "")


def widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether `target` holds every value of `source` of the same kind (floating, integer, complex) exactly."""
    if source == target:
        return True
    kinds = [(d.is_complex, d.is_floating_point) for d in (source, target)]
    opaque = (torch.bool, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu)
    if kinds[0] != kinds[1] or source in opaque or target in opaque:
        return False
    if source.is_floating_point or source.is_complex:
        a, b = torch.finfo(source), torch.finfo(target)
        return b.eps <= a.eps and b.max >= a.max and b.smallest_normal * b.eps <= a.smallest_normal * a.eps
    i, j = torch.iinfo(source), torch.iinfo(target)
    return j.min <= i.min and j.max >= i.max


def _saved_boxes(folder: Folder, listing: Listing, manifest: folders.Manifest, tables: Sequence[Table]) -> list[_Saved]:
    """Every saved box of what is asked for, in the same order on every rank."""
    return [
        _Saved(_place_of(folder, tensors[name], box), section, box, digest)
        for section, tensors in listing.tensors.items()
        for name in sorted(tensors.keys() & {name for table in tables for name in table[section]})
        for box, digest in manifest.checksums.get(section, {}).get(name, ())
    ]


def _place_of(folder: Folder, tensor: Stored, box: Box) -> Place:
    """The place that has all of a box."""
    for place in tensor.places:
        if place.box.contains(box):
            return place
    raise ValueError(
        f"{folder / folders.MANIFEST} has a checksum of {tensor.spec.name}, {box}, and no file has that part whole: "
        "the files are not this checkpoint's; use another checkpoint"
    )


def _sharing(tables: Sequence[Table], rank: int) -> dict[tuple[str, str], tuple[int, int]]:
    """(section, name) of what this rank holds -> its turn among the ranks that hold the same part, and their number."""
    sharing = {}
    for section, tensors in tables[rank].items():
        for name, held in tensors.items():
            same = [r for r, table in enumerate(tables) if table[section].get(name) == held]
            sharing[section, name] = (same.index(rank), len(same))
    return sharing


def _loaded_whole(saved: Sequence[_Saved], tables: Sequence[Table], rank: int) -> list[int]:
    """Numbers of the boxes that this rank has whole in memory, without a cast; ranks with equal parts take turns."""
    sharing = _sharing(tables, rank)
    mine = []
    for number, each in enumerate(saved):
        key = (each.section, each.place.name)
        if key in sharing:
            dtype, _, held_box = tables[rank][each.section][each.place.name]
            turn, holders = sharing[key]
            if dtype == each.place.spec.dtype and held_box.contains(each.box) and number % holders == turn:
                mine.append(number)
    return mine
