"""Convert a model or checkpoint: `python tools/convert.py SRC DST --to composable|dcp|torch`.

SRC, recognised by what is in it, is a Hugging Face folder (safetensors or pytorch_model*.bin), a checkpoint of ours, a
folder of torch.distributed.checkpoint, a file of a state dict (or a folder of ours of such), or a folder of Meta's
consolidated.*.pth; safetensors may also lie behind a URL. Pickles are loaded with weights_only. DST is a new local
folder:

* composable: a Hugging Face folder with checksums, which is a checkpoint of ours;
* dcp: what torch.distributed.checkpoint loads as {"model": ..., "optimizer": {"state": {weight: ...}}};
* torch: model.pt, a state dict, and optimizer.pt, {"state": {weight: ...}}.

Configuration and tokenizer go along, and of our checkpoints the optimizer's state, step, place in the data and seed:
each of the three becomes any other, and itself again, to the bit. What another's checkpoint has beside weights and
optimizer's state (learning rates, counters) is named and left out, so that it starts a run (--init-from) but resumes
none. Its model must be one that we compute, but for --any-model. DST appears when it is complete. The process takes no
more than --memory (pages of files that the kernel may drop do not count).
"""

import dataclasses
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from tqdm import tqdm

from composable.checkpoint.budget import chunk_bytes, parse_size, size_text
from composable.checkpoint.draft import check_target
from composable.checkpoint.formats import hugging_face, torch_file
from composable.checkpoint.formats.recognise import open_source
from composable.checkpoint.formats.source import Source, Target, narrowed, without, write
from composable.checkpoint.remote import as_folder
from composable.checkpoint.rewrite import STATE
from composable.checkpoint.transfer import THREADS
from composable.models.families import from_hugging_face, mtp_names, unread

Dtype = Literal["", "float32", "bfloat16", "float16", "float64"]
MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")  # of config.json: how many there are
SHOWN = 5


@dataclass(frozen=True)
class Args:
    """Convert a model or checkpoint."""

    src: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """A folder or file, or the URL of a folder of safetensors files."""
    dst: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """The folder to write: a new or an empty one."""
    to: Literal["composable", "dcp", "torch"]
    """The format to write; composable is a Hugging Face folder."""
    dtype: Dtype = ""
    """Cast floating-point weights to this, also where that loses values; the optimizer's state stays as it is."""
    dequantise: Dtype = ""
    """Make ordinary weights of those that are quantised in blocks (fp8 as DeepSeek-V3's, MXFP4 as gpt-oss's)."""
    drop_mtp: bool = False
    """Leave out the layers for multi-token prediction."""
    weights_only: bool = False
    """Leave out the state of the optimizer, and how far the run was."""
    any_model: bool = False
    """Copy the tensors of a model that we do not compute as they are."""
    max_file_size: str = "5GB"
    """With --to composable: the most bytes of tensors in a file."""
    plan: bool = False
    """Print what would be read and written, and write nothing."""
    memory: str = "2GB"
    """The most memory that the process takes."""


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    args = tyro.cli(Args, args=arguments, description=__doc__)
    try:
        beside = THREADS * hugging_face.QUANTISED if args.dequantise else 0
        chunk, path = chunk_bytes(parse_size(args.memory) - beside), check_target(args.dst, args.src)
        size = parse_size(args.max_file_size)
        found = changed(open_source(args.src, weights_only=args.weights_only), args)
        target = planned(found, args.to, size)

        def check() -> None:
            if of_ours(args):
                check_model(found, args.src)

        if args.plan:
            check()
            print("\n".join(plan_lines(found, target, args)))
            return 0
        with tqdm(total=found.nbytes, unit="B", unit_scale=True, disable=None) as bar:
            write(target, path, chunk, bar.update, check)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for note in notes(found, args):
        print(f"{args.src}: {note}")
    print(f"{args.dst}: {size_text(found.nbytes)} of tensors of {found.kind}, as {args.to}")
    return 0


def changed(found: Source, args: Args) -> Source:
    """The source with what the options change in it."""
    if args.weights_only:
        small = {name: content for name, content in found.small.items() if name != STATE}
        found = dataclasses.replace(found, small=small)
    if args.drop_mtp:
        config = config_of(found, args.src)
        found = without(found, mtp_names(config), "for multi-token prediction")
        found = found.with_config(config | {key: 0 for key in MTP_KEYS if key in config})
    if args.dequantise:
        folder = as_folder(args.src)
        folder = folder.parent if isinstance(folder, Path) and folder.is_file() else folder
        found = hugging_face.dequantised(folder, found, getattr(torch, args.dequantise))
    return narrowed(found, getattr(torch, args.dtype)) if args.dtype else found


def config_of(found: Source, where: str) -> dict[str, Any]:
    """The content of config.json; ValueError where there is none."""
    if "config.json" not in found.small:
        raise ValueError(
            f"{where} has no config.json, which tells what model it is; put it beside the weights, or write --any-model"
        )
    return found.config


def of_ours(args: Args) -> bool:
    """Whether what is written must be a model that we compute."""
    return args.to == "composable" and not args.any_model


def notes(found: Source, args: Args) -> list[str]:
    """What of the source is not taken along, or not looked at."""
    others = unread(found.config) if of_ours(args) else []
    told = [f"not read of config.json: {', '.join(others)}"] if others else []
    return [*found.notes, *told]


def check_model(found: Source, where: str) -> None:
    """Refuse a model that we do not compute: its family, its options, or its tensors (ValueError tells which)."""
    # What takes long to import: `write` has this run beside the copying.
    from composable._torch import fake_tensor_mode
    from composable.models.decoder import Decoder
    from composable.models.names import in_file

    config = config_of(found, where)
    try:
        model = from_hugging_face(config)
        with fake_tensor_mode():
            wanted = {name: tuple(t.shape) for name, t in in_file(dict(Decoder(model).state_dict()), model).items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}/config.json is no model's configuration: {error!r}") from error
    except ValueError as error:
        raise ValueError(f"{error}; or copy its tensors as they are: --any-model") from error
    ahead: Callable[[str], bool] = mtp_names(config)
    tensors = hugging_face.logical(found)
    have = {name: t.spec.shape if hasattr(t, "spec") else t.shape for name, t in tensors.items()}
    one = {hugging_face.EMBEDDING, hugging_face.HEAD} if model.tied else set()
    extra = [n for n in have if n not in wanted and n not in one and not ahead(n) and not n.endswith(".inv_freq")]
    wrong = [f"{n} of shape {have[n]}, not {wanted[n]}" for n in wanted if n in have and have[n] != wanted[n]]
    missing = [n for n in wanted if n not in have and not (n in one and one & have.keys())]
    for names, what in ((extra, "has"), (missing, "lacks"), (wrong, "has")):
        if names:
            shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
            raise ValueError(
                f"{where} {what} {shown}: that is not the model that its config.json tells of; to copy its tensors as "
                "they are, write --any-model"
            )


def planned(found: Source, to: str, max_file_size: int) -> Target:
    """The files of the format that was asked for."""
    if to == "composable":
        return hugging_face.target(found, max_file_size)
    if to == "torch":
        return torch_file.target(found)
    from composable.checkpoint.formats import dcp  # and DTensor with it: other formats need not wait for that

    return dcp.target(found)


def plan_lines(found: Source, target: Target, args: Args) -> list[str]:
    """What would be read and written."""
    lines = [f"read   {args.src}: {found.kind}, {len(found.files):,} files with tensors"]
    lines += [f"       {section}: {len(tensors):,} tensors" for section, tensors in found.sections.items() if tensors]
    lines += [f"       {note}" for note in notes(found, args)]
    if args.dtype or args.dequantise:
        lines.append(f"       weights become {args.dtype or args.dequantise} (what that loses is lost)")
    about = "" if args.to == "composable" else "about "
    lines += [f"write  {args.dst}/{name}  " + (f"{about}{size:,}" if size else "") for name, size in target.names]
    lines += [f"write  {args.dst}/{name}  {len(content):,}" for name, content in target.small.items()]
    if args.to == "composable":
        lines.append(f"write  {args.dst}: an index for each section, and manifest.json")
    return [*lines, f"{target.nbytes:,} bytes in all ({size_text(target.nbytes)}), memory at most {args.memory}"]


if __name__ == "__main__":
    status = main()
    gc.freeze()  # all that was imported is not looked through once more: the exit takes half as long
    sys.exit(status)
