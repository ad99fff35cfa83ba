"""Which format something is in, by what lies there."""

from __future__ import annotations

from pathlib import Path

from composable.checkpoint import folder as folders
from composable.checkpoint.formats import hugging_face, meta, torch_file
from composable.checkpoint.formats.source import Source
from composable.checkpoint.remote import as_folder

DCP_METADATA = ".metadata"
DCP_SUFFIX = ".distcp"
PICKLES = (".pt", ".pth", ".bin", ".ckpt")


def open_source(where: str, *, weights_only: bool = False) -> Source:
    """What lies at a path, or (safetensors alone) at a URL, with the optimizer's state unless `weights_only`.

    No tensor is read.

    Raises:
        ValueError: what is in none of the formats, and what the format's `source` raises.
        FileNotFoundError: nothing is there.
    """
    path = as_folder(where)
    if isinstance(path, Path) and path.is_file():
        if path.suffix == ".safetensors":
            raise ValueError(f"{where} is a file of safetensors; give its folder")
        return torch_file.source(path, weights_only=weights_only)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no file or folder {where}")
    ours = any((path / name).is_file() for name in (folders.MANIFEST, folders.PARTIAL))
    if ours or any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        return hugging_face.source(path, weights_only=weights_only)
    if isinstance(path, Path):
        if (path / DCP_METADATA).is_file() or any(path.glob(f"*{DCP_SUFFIX}")):
            from composable.checkpoint.formats import dcp  # and DTensor with it: other formats need not wait for that

            return dcp.source(path, weights_only=weights_only)
        if meta.is_one(path):
            return meta.source(path)
        if any(path.glob(hugging_face.BIN)) or (path / hugging_face.BIN_INDEX).is_file():
            return hugging_face.source_bin(path)
        if (path / torch_file.NAMES["weights"]).is_file():
            return torch_file.source(path, weights_only=weights_only)
        if several := sorted(entry.name for entry in path.iterdir() if entry.suffix in PICKLES):
            raise ValueError(f"{where} holds {', '.join(several[:5])}; give one of these files")
    raise ValueError(
        f"{where} is no checkpoint: it holds no safetensors or {hugging_face.BIN} files, no {DCP_METADATA} of "
        f"torch.distributed.checkpoint, no {meta.FILES} and no {torch_file.NAMES['weights']}"
        + ("" if isinstance(path, Path) else " (of a URL, only safetensors are read)")
    )
