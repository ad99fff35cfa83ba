"""A reader of checkpoints by their description alone (composable/checkpoint/README.md), with safetensors and json."""

import json
from pathlib import Path

from safetensors import safe_open

KNOWN = 2


def manifest(folder: Path) -> dict:
    path = folder / "manifest.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no complete checkpoint")
    found = json.loads(path.read_text())
    if found["format"] != "composable.checkpoint" or found["version"] > KNOWN:
        raise ValueError(f"{path} is {found['format']} of version {found['version']}; this reader knows up to {KNOWN}")
    for name, entry in found["files"].items():
        if (folder / name).stat().st_size != entry["size"]:
            raise ValueError(f"{folder / name} is not the checkpoint's: its size is another")
    return found


def newest(root: Path) -> Path:
    return max((path.parent for path in root.glob("step-*/manifest.json")), key=lambda path: int(path.name[5:]))


def read(folder: Path, section: str = "weights") -> dict:
    """All tensors of a section, `weights` or `optimizer`, by name."""
    manifest(folder)
    base, prefix = (folder, "model") if section == "weights" else (folder / "optimizer", "optimizer")
    index = base / f"{prefix}.safetensors.index.json"
    if section == "optimizer" and not index.is_file():
        return {}
    tensors: dict = {}
    for file in sorted(set(json.loads(index.read_text())["weight_map"].values())):
        with safe_open(base / file, framework="pt") as content:
            parts = json.loads((content.metadata() or {}).get("composable.parts", "{}"))
            for entry in content.keys():  # noqa: SIM118
                tensor = content.get_tensor(entry)
                if entry not in parts:
                    tensors[entry] = tensor
                    continue
                part = parts[entry]
                whole = tensors.setdefault(part["name"], tensor.new_empty(part["shape"]))
                whole[tuple(slice(o, o + n) for o, n in zip(part["offsets"], tensor.shape, strict=True))] = tensor
    return tensors


def state(folder: Path) -> dict:
    return json.loads((folder / "train_state.json").read_text())
