"""Show what a checkpoint holds: `python tools/show.py CKPT [--verify] [--tensor NAME] [--diff OTHER]`.

CKPT is a checkpoint, any folder of safetensors files (of the Hugging Face Hub, say), a folder of files for inference
ranks, or the URL of one. Without an option: the tree of names with shapes, dtypes, bytes and files (layers and experts
that are alike stand once), totals, and what is known of the run. With options, what they ask for. Nothing is written.
The process takes no more than --memory. It exits 1 if --verify finds damage or --diff a difference, 2 after an error.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from tqdm import tqdm

from composable.checkpoint.budget import chunk_bytes, parse_size, size_text
from composable.checkpoint.compare import differences, statistics
from composable.checkpoint.folder import read_manifest
from composable.checkpoint.for_ranks import LAYOUT, layout_files
from composable.checkpoint.format import Stored
from composable.checkpoint.listing import Listing, list_folder
from composable.checkpoint.remote import Folder, as_folder
from composable.checkpoint.rewrite import STATE
from composable.checkpoint.tree import fold
from composable.checkpoint.verify import find_damage


@dataclass(frozen=True)
class Args:
    """Show what a checkpoint holds."""

    ckpt: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CKPT")]
    """A folder of safetensors files, or the URL of one."""
    verify: bool = False
    """Compare every byte with the checksums of the manifest, and name broken files and their tensors."""
    tensor: str = ""
    """Show statistics of this tensor instead."""
    diff: str = ""
    """Compare with this other checkpoint instead, tensor by tensor."""
    memory: str = "2GB"
    """The most memory that the process takes."""


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    args = tyro.cli(Args, args=arguments, description=__doc__)
    try:
        if sum([args.verify, bool(args.tensor), bool(args.diff)]) > 1:
            raise ValueError("--verify, --tensor and --diff are three questions; ask one at a time")
        folder, chunk = as_folder(args.ckpt), chunk_bytes(parse_size(args.memory))
        if args.verify:
            return verify(folder)
        if args.tensor:
            return show_tensor(folder, args.tensor, chunk)
        if args.diff:
            return diff(folder, as_folder(args.diff), chunk)
        print("\n".join(overview(folder, list_folder(folder))))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def progress(total: int) -> tqdm:
    """A bar of bytes; none where nobody watches."""
    return tqdm(total=total, unit="B", unit_scale=True, disable=None)


def overview(folder: Folder, listing: Listing) -> Iterator[str]:
    """The lines about a folder: what it is, how far the run was, all tensors, totals."""
    yield str(folder)
    if listing.manifest:
        yield "  kind      a complete checkpoint"
    elif layout_files(folder):
        layout = facts(folder / LAYOUT)
        degrees = " ".join(f"{name} {layout.get(name)}" for name in ("pp", "tp", "ep"))
        yield f"  kind      files for ranks of inference: {degrees}"
    else:
        yield "  kind      safetensors files"
    if config := facts(folder / "config.json"):
        yield f"  model     {config.get('model_type', 'of no type')}"
    yield from run_lines(facts(folder / STATE))
    for section, tensors in listing.tensors.items():
        if tensors:
            yield ""
            yield from section_lines(section, tensors)


def facts(path: Folder) -> Mapping[str, Any]:
    """The content of a JSON file; nothing if there is no such file."""
    try:
        found = json.loads(path.read_bytes()) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no JSON object")
    return found


def run_lines(state: Mapping[str, Any]) -> Iterator[str]:
    """What the state of a run tells: step, place in the data, and what wrote it, as far as it does."""
    if "step" in state:
        yield f"  step      {state['step']:,}" + (f" of {state['steps']:,}" if "steps" in state else "")
    counts = [f"{state[key]:,} {name}" for key, name in COUNTS.items() if key in state]
    if counts:
        data = state.get("data", {})
        print_ = f"; data {data['fingerprint']}" if "fingerprint" in data else ""
        yield f"  data      {', '.join(counts)}{print_}"
    if layout := state.get("layout"):
        degrees = " ".join(f"{name} {n}" for name, n in layout.items() if name != "world" and n != 1)
        yield f"  layout    {layout.get('world', '?')} ranks: {degrees}"
    writer = state.get("recipe", {}).get("checkpoint", {}).get("writer")
    versions = ", ".join(f"{name} {version}" for name, version in state.get("versions", {}).items())
    if writer or versions:
        yield f"  written   by {versions or 'unknown versions'}" + (f", writer {writer}" if writer else "")


COUNTS = {"samples": "samples consumed", "tokens": "tokens", "valid_tokens": "with a label"}


def section_lines(section: str, tensors: Mapping[str, Stored]) -> Iterator[str]:
    """A section's table, and its totals."""
    values = sum(_numel(tensor) for tensor in tensors.values())
    size = sum(tensor.spec.nbytes for tensor in tensors.values())
    files = {place.file for tensor in tensors.values() for place in tensor.places}
    counts = f"{len(tensors):,} tensors, {values:,} values, {size:,} bytes ({size_text(size)})"
    yield f"{section}: {counts}, {len(files):,} file{'s' * (len(files) != 1)}"
    table = []
    for row in fold(tensors):
        name = "  " * (row.depth + 1) + row.name
        if not row.tensors:
            table.append((name, "", "", "", ""))
            continue
        count = f"{len(row.tensors)} x " if len(row.tensors) > 1 else ""
        table.append((name, f"{count}{list(row.shape)}", row.dtype, f"{row.nbytes:,}", row.files))
    widths = [max(len(line[column]) for line in table) for column in range(4)]
    for name, shape, dtype, nbytes, where in table:
        line = f"{name:<{widths[0]}}  {shape:>{widths[1]}}  {dtype:<{widths[2]}}  {nbytes:>{widths[3]}}  {where}"
        yield line.rstrip()


def _numel(tensor: Stored) -> int:
    return tensor.spec.nbytes // tensor.spec.dtype.itemsize


def verify(folder: Folder) -> int:
    """Check every byte; prints what is broken."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    manifest = read_manifest(folder)
    if manifest is None:
        count = len(list_folder(folder).tensors["weights"])
        print(f"{folder}: {count:,} tensors, headers and sizes agree; there are no checksums (no manifest.json)")
        return 0
    with progress(sum(size for size, _ in manifest.files.values())) as bar:
        damage = find_damage(folder, manifest, bar.update)
    for entry in damage:
        print(f"BROKEN {folder / entry.file} {entry.reason}")
        for name in entry.tensors:
            print(f"    {name}")
    if damage:
        return 1
    boxes = sum(len(boxes) for tensors in manifest.checksums.values() for boxes in tensors.values())
    print(f"{folder}: {len(manifest.files):,} files and {boxes:,} checksums of tensors agree")
    return 0


def show_tensor(folder: Folder, name: str, chunk: int) -> int:
    """Print statistics of one tensor."""
    tensors = {n: stored for section in list_folder(folder).tensors.values() for n, stored in section.items()}
    if name not in tensors:
        near = [other for other in tensors if name in other][:3]
        raise ValueError(f"{folder} has no tensor {name}" + (f"; it has {', '.join(near)} ..." if near else ""))
    stored = tensors[name]
    with progress(stored.spec.nbytes) as bar:
        found = statistics(folder, stored, chunk, bar.update)
    print(f"{name}  {list(stored.spec.shape)}  {stored.spec.dtype}  {stored.spec.nbytes:,} bytes")
    print(f"  files     {', '.join(sorted({place.file for place in stored.places}))}")
    for label in ("values", "zeros", "nan", "infinite"):
        print(f"  {label:<9} {getattr(found, label):,}")
    for label in ("minimum", "maximum", "mean", "std", "norm"):
        print(f"  {label:<9} {getattr(found, label)!r}")
    print(f"  first     {', '.join(map(repr, found.first))}")
    return 0


def diff(folder: Folder, other: Folder, chunk: int) -> int:
    """Print how every tensor differs."""
    a, b = list_folder(folder), list_folder(other)
    total = sum(stored.spec.nbytes for section in a.tensors.values() for stored in section.values())
    equal = different = 0
    with progress(total) as bar:
        for entry in differences((folder, a), (other, b), chunk, bar.update):
            label = f"{entry.section}/{entry.name}" if entry.section != "weights" else entry.name
            if not entry.what:
                equal += 1
                bar.write(f"{label}: equal", file=sys.stdout)
                continue
            different += 1
            size = "" if entry.absolute is None else f", difference {entry.absolute:.3e}, relative {entry.relative:.3e}"
            bar.write(f"{label}: {entry.what}{size}", file=sys.stdout)
    print(f"{equal:,} tensors are equal, {different:,} differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
