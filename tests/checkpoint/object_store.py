"""A store as object stores are, for tests over several processes: `objects:///folder/of/this/machine`."""

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem


class ObjectStore(DirFileSystem):
    """A store of objects, on a folder that processes share: files are put whole and never renamed; folders are not."""

    protocol = "objects"

    def __init__(self, **options):
        super().__init__(path="/", fs=LocalFileSystem(auto_mkdir=True), **options)

    @classmethod
    def _strip_protocol(cls, path):
        return str(path).removeprefix("objects://").rstrip("/")

    def unstrip_protocol(self, name):
        return f"objects://{name}"

    def open(self, path, mode="rb", **options):
        if mode not in ("rb", "wb") or (mode == "wb" and path.endswith("/")):
            raise ValueError(f"an object is put or read, not opened with {mode}")
        return super().open(path, mode, **options)

    def mv(self, *paths, **options):
        raise NotImplementedError("an object is not renamed")


fsspec.register_implementation("objects", ObjectStore, clobber=True)
