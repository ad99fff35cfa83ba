"""Average the weights of checkpoints of one model: `python tools/average.py DST SRC SRC... [--weights 0.5,0.5]`.

Each SRC is a checkpoint, any folder of safetensors files, or the URL of one; DST is a new local folder, a plain Hugging
Face one with the configuration and tokenizer of the first SRC. Sums are float64, the result has the first one's dtypes.
Weights count relative to their sum. Checksums of the sources are checked before. What is no floating-point tensor must
be the same in all. DST appears when it is complete. The process takes no more than --memory.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from tqdm import tqdm

from composable.checkpoint.average import Mean, plan_mean, write_mean
from composable.checkpoint.budget import chunk_bytes, parse_size, size_text
from composable.checkpoint.draft import check_target
from composable.checkpoint.remote import as_folder
from composable.checkpoint.verify import check_weights


@dataclass(frozen=True)
class Args:
    """Average the weights of checkpoints of one model."""

    dst: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """The folder to write: a new or an empty one."""
    sources: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SRC...")]
    """Two or more folders of safetensors files, or their URLs."""
    weights: str = ""
    """A number for each SRC, separated by commas; equal ones if not given."""
    max_file_size: str = "5GB"
    """The most bytes of tensors in a file."""
    verify: bool = True
    """Check the checksums of the sources first, where there are any."""
    plan: bool = False
    """Print what would be read and written, and write nothing."""
    memory: str = "2GB"
    """The most memory that the process takes."""


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    args = tyro.cli(Args, args=arguments, description=__doc__)
    try:
        chunk, target = chunk_bytes(parse_size(args.memory)), check_target(args.dst, *args.sources)
        if len(args.sources) < 2:
            raise ValueError(f"{len(args.sources)} checkpoints; an average is of two or more")
        folders = [as_folder(source) for source in args.sources]
        plan = plan_mean(folders, weights_of(args.weights), parse_size(args.max_file_size))
        if args.plan:
            print("\n".join(plan_lines(plan, args)))
            return 0
        checked = [(where, found.manifest) for where, found, _ in plan.sources if args.verify and found.manifest]
        with tqdm(total=(1 + len(checked)) * plan.nbytes, unit="B", unit_scale=True, disable=None) as bar:
            for folder, manifest in checked:
                check_weights(folder, manifest, bar.update)
            write_mean(plan, target, chunk, bar.update)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.dst}: the mean of {len(folders)} checkpoints, {size_text(plan.nbytes)}")
    return 0


def weights_of(text: str) -> Sequence[float] | None:
    """The numbers in `0.5,0.5`; None if there are none."""
    try:
        return [float(word) for word in text.split(",")] if text else None
    except ValueError as error:
        raise ValueError(f"--weights {text}: write numbers separated by commas, as 0.5,0.5") from error


def plan_lines(plan: Mean, args: Args) -> list[str]:
    """What would be read and written."""
    lines = []
    for (_, listing, weight), source in zip(plan.sources, args.sources, strict=True):
        size = sum(tensor.spec.nbytes for tensor in listing.tensors["weights"].values())
        lines.append(f"read   {source}: {size:,} bytes of tensors, weight {weight:g}")
    lines += [f"write  {args.dst}/{file.name}  {file.size:,}" for file in plan.files]
    lines += [f"write  {args.dst}/{name}  {len(content):,}" for name, content in plan.small.items()]
    return [*lines, f"{plan.nbytes:,} bytes in all ({size_text(plan.nbytes)}), memory at most {args.memory}"]


if __name__ == "__main__":
    sys.exit(main())
