"""Files for the ranks of an inference engine: each holds what one rank needs, under the tensors' own names.

`pp0-tp3.safetensors` is an ordinary safetensors file. What of a tensor it holds is an entry of the tensor's name with
the part's shape; what every rank needs stands in the files of all. The header's metadata tells parts as it does in a
checkpoint (`composable.parts`), so that the whole can be put together again. `layout.json` beside the files is the mark
of such a folder and says who is who.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from composable.checkpoint.remote import Folder

LAYOUT = "layout.json"
FORMAT = "composable.layout"
VERSION = 1


def encode_layout(files: Mapping[str, int], facts: Mapping[str, Any]) -> str:
    """The text of `layout.json`: the files with their sizes in bytes, and what else is to be told of them."""
    return json.dumps({"format": FORMAT, "version": VERSION, **facts, "files": dict(files)}, indent=2) + "\n"


def layout_files(folder: Folder) -> Sequence[str]:
    """The names of the files if this is a folder of files for ranks, else none.

    Raises:
        ValueError: a layout of a newer version, or one that cannot be read; a file that is missing.
    """
    path = folder / LAYOUT
    if not path.is_file():
        return ()
    try:
        document = json.loads(path.read_bytes())
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            return ()
        version, files = document["version"], dict(document["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no layout of files for ranks: {error!r}") from error
    if type(version) is not int or not 1 <= version <= VERSION:
        raise ValueError(f"{path} has version {version!r}, this composable reads up to {VERSION}; update composable")
    for file in files:
        if not (folder / file).is_file():
            raise ValueError(f"{folder / file} is missing, {path} names it; copy the folder again")
    return sorted(files)
