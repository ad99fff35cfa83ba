"""Write the same tensors in other files: `python tools/reshard.py SRC DST [how]`.

SRC is a checkpoint, a folder of safetensors files, files for ranks as below, or the URL of one; DST a new local folder.

* without more: common files of at most --max-file-size, as the writer `shared` makes them;
* --writer per_rank --ranks N: the files that N ranks write, each its own;
* --layout tp=8,pp=2: files for an inference engine. pp0-tp3.safetensors is all that one rank loads, and holds its part
  of each tensor under the tensor's own name. Layers go to pp in equal numbers, the embedding to the first stage, last
  norm and head to the last (a tied embedding to both). tp cuts rows of q, k, v, gate and up, columns of o and down,
  rows of embedding and head; norms, routers, shared experts, the biases of o and down, and k and v whose heads do not
  divide by tp, are whole in each file. With ep, which divides tp (1 if not given), a tensor rank has experts of its
  own; the tp / ep ranks of the same experts cut their width. layout.json beside the files says who has which layers.
  Such files hold weights only, and no checksums; given as SRC, they become a checkpoint again.

A checkpoint keeps the state of its optimizer, and all that it tells of the run, but for --weights-only. Checksums of
the source are checked while it is read. DST appears when it is complete. The process takes no more than --memory.
"""

import dataclasses
import gc
import json
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from tqdm import tqdm

from composable.checkpoint.budget import chunk_bytes, parse_size, size_text
from composable.checkpoint.draft import check_target
from composable.checkpoint.for_ranks import LAYOUT, encode_layout
from composable.checkpoint.listing import list_folder
from composable.checkpoint.remote import Folder, as_folder
from composable.checkpoint.rewrite import Rewrite, plan_checkpoint, plan_for_ranks, rewrite
from composable.models.families import from_hugging_face


@dataclass(frozen=True)
class Args:
    """Write the same tensors in other files."""

    src: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """A folder of safetensors files, or the URL of one."""
    dst: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """The folder to write: a new or an empty one."""
    max_file_size: str = ""
    """The most bytes of tensors in a file (5GB if not given)."""
    writer: Literal["shared", "per_rank"] = "shared"
    """Common files, or each rank's own."""
    ranks: int = 0
    """With --writer per_rank: how many."""
    layout: str = ""
    """Files for the ranks of an inference engine: degrees of tp, pp and ep."""
    weights_only: bool = False
    """Leave out the state of the optimizer, and how far the run was."""
    plan: bool = False
    """Print what would be read and written, and write nothing."""
    memory: str = "2GB"
    """The most memory that the process takes."""


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    args = tyro.cli(Args, args=arguments, description=__doc__)
    try:
        chunk, target = chunk_bytes(parse_size(args.memory)), check_target(args.dst, args.src)
        plan = planned(args)
        if args.plan:
            print("\n".join(plan_lines(plan, args)))
            return 0
        with tqdm(total=plan.nbytes_read, unit="B", unit_scale=True, disable=None) as bar:
            rewrite(plan, target, chunk, bar.update)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.dst}: {len(plan.names):,} files of tensors, {size_text(plan.nbytes)}")
    return 0


def planned(args: Args) -> Rewrite:
    """What the options ask for; ValueError for those that exclude each other."""
    source = as_folder(args.src)
    if args.layout:
        if args.writer != "shared" or args.ranks or args.max_file_size:
            raise ValueError("--layout makes one file for each rank; leave out --writer, --ranks and --max-file-size")
        return plan_layout(source, args.layout)
    if args.writer == "per_rank" and args.ranks < 1:
        raise ValueError(f"--writer per_rank with --ranks {args.ranks}: say how many ranks, 1 or more")
    if args.writer == "shared" and args.ranks:
        raise ValueError(f"--ranks {args.ranks}: common files are the same for any number; add --writer per_rank")
    size = parse_size(args.max_file_size or "5GB")
    return plan_checkpoint(source, size, args.writer, max(1, args.ranks), weights_only=args.weights_only)


def plan_layout(source: Folder, degrees: str) -> Rewrite:
    """Files for inference ranks; ValueError where config.json is missing or tells of a model that they do not fit."""
    from composable.parallel.for_ranks import Layout, held_boxes  # and DTensor with it: others need not wait for that

    layout, listing = Layout.parse(degrees), list_folder(source, ["weights"])
    path = source / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing; --layout needs it to know the model's layers and heads")
    try:
        config = from_hugging_face(json.loads(path.read_bytes()))
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no model's configuration: {error!r}") from error
    shapes = {name: tensor.spec.shape for name, tensor in listing.tensors["weights"].items()}
    plan = plan_for_ranks(source, listing, held_boxes(config, shapes, layout))
    stages = [[stage.start, stage.stop] for stage in layout.stages(config.layers)]
    text = encode_layout(dict(plan.names), {**dataclasses.asdict(layout), "layers": stages})
    return dataclasses.replace(plan, small={**plan.small, LAYOUT: text.encode()})


def plan_lines(plan: Rewrite, args: Args) -> list[str]:
    """What would be read and written."""
    read = {p.file for o in plan.outputs for t in plan.listing.tensors[o.section].values() for p in t.places}
    lines = [f"read   {args.src}: {len(read):,} files, {plan.nbytes_read:,} bytes of tensors"]
    lines += [f"write  {args.dst}/{name}  {size:,}" for name, size in plan.names]
    lines += [f"write  {args.dst}/{name}  {len(content):,}" for name, content in plan.small.items()]
    if plan.sections:
        lines.append(f"write  {args.dst}: an index for each section, and manifest.json")
    return [*lines, f"{plan.nbytes:,} bytes in all ({size_text(plan.nbytes)}), memory at most {args.memory}"]


if __name__ == "__main__":
    status = main()
    gc.freeze()  # all that was imported is not looked through once more: the exit takes half as long
    sys.exit(status)
