"""A folder that appears under its name when it is complete, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from composable.checkpoint import folder as folders
from composable.checkpoint.remote import is_url


def check_target(target: str, *sources: str) -> Path:
    """The folder that `target` names, to be made of what lies in `sources`.

    Raises:
        ValueError: a URL, where nothing is renamed; a folder in a source.
        FileExistsError: there is something under the name that is not an empty folder.
    """
    if "://" in target:
        raise ValueError(f"{target} is a URL; write to a local folder, and copy that to the store")
    path = Path(target)
    if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
        raise FileExistsError(f"{target} exists and is no empty folder; choose another name, or delete it")
    for source in sources:
        if not is_url(source) and path.resolve().is_relative_to(Path(source.removeprefix("file://")).resolve()):
            raise ValueError(f"{target} lies in {source}, which is read; write to a folder beside it")
    return path


@contextlib.contextmanager
def drafted(target: Path, needed: int) -> Iterator[Path]:
    """A new folder beside `target` to write into, renamed to it at the end; after an error nothing is left of it.

    What a program that was killed left of its draft is replaced. `needed` are the bytes that will be written.

    Raises:
        OSError: the disk has less room; another process writes the same folder.
    """
    target = target.absolute()
    made = [parent for parent in target.parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.parent / f".{target.name}.draft"
    try:
        if draft.is_symlink():
            raise FileExistsError(f"{draft} is a link, and what it points to is not ours to empty; delete it")
        draft.mkdir(exist_ok=True)
        with folders.locked(draft):
            try:
                _empty(draft)
                free = shutil.disk_usage(draft).free
                if needed > free:
                    raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed and {free:,} are free", str(target))
                yield draft
                folders.sync_folder(draft)
                os.rename(draft, target)  # over an empty folder at most
                folders.sync_folder(target.parent)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
    except BaseException:
        for parent in made:
            with contextlib.suppress(OSError):  # what is not empty is somebody's
                parent.rmdir()
        raise


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
