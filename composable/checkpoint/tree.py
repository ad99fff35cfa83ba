"""The names of a checkpoint's tensors as people read them: layers and experts that are alike stand once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from composable.checkpoint.format import NAMES, Stored


@dataclass(frozen=True)
class Row:
    """A line of the tree: a heading (`model.layers.0..27.`, no tensors) or one tensor, or as many as were folded.

    `name` is what follows the headings above it; `depth` is their number. `shape` and `dtype` are those of one tensor.
    """

    depth: int
    name: str
    tensors: tuple[Stored, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each of the tensors."""
        return self.tensors[0].spec.shape

    @property
    def dtype(self) -> str:
        """Their dtype, as the format calls it."""
        return NAMES[self.tensors[0].spec.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.spec.nbytes for tensor in self.tensors)

    @property
    def files(self) -> str:
        """The files in which they lie, the first and the last of many."""
        files = sorted({place.file for tensor in self.tensors for place in tensor.places})
        return ", ".join(files) if len(files) < 3 else f"{files[0]} ... {files[-1]} ({len(files)})"


@dataclass
class _Node:
    tensor: Stored | None = None
    children: dict[str, _Node] = field(default_factory=dict)

    def kind(self) -> object:
        """Equal for nodes under which are the same names, shapes and dtypes."""
        own = self.tensor and (self.tensor.spec.dtype, self.tensor.spec.shape)
        return own, tuple((name, self.children[name].kind()) for name in sorted(self.children))


def fold(tensors: Mapping[str, Stored]) -> list[Row]:
    """The tree of names in natural order; neighbours by number (layers, experts) with the same content are one."""
    root = _Node()
    for name, tensor in tensors.items():
        node = root
        for part in name.split("."):
            node = node.children.setdefault(part, _Node())
        node.tensor = tensor
    return list(_rows([root], "", 0))


def _rows(nodes: Sequence[_Node], prefix: str, depth: int) -> Iterator[Row]:
    """Rows of what is under `nodes`, which are alike."""
    for names in _alike(nodes[0]):
        below = [node.children[name] for node in nodes for name in names]
        label = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
        stored = tuple(node.tensor for node in below if node.tensor)
        if stored:
            yield Row(depth, prefix + label, stored)
        if not below[0].children:
            continue
        if names[0].isdecimal():
            yield Row(depth, f"{prefix}{label}.")
            yield from _rows(below, "", depth + 1)
        else:
            yield from _rows(below, f"{prefix}{label}.", depth)


def _alike(node: _Node) -> list[list[str]]:
    """The names under a node, those that follow each other as numbers and are alike together."""
    groups: list[list[str]] = []
    kinds: list[object] = []
    for name in sorted(node.children, key=_by_number):
        kind = node.children[name].kind() if name.isdecimal() else None
        if kind is not None and groups and kinds[-1] == kind and int(name) == int(groups[-1][-1]) + 1:
            groups[-1].append(name)
        else:
            groups.append([name])
            kinds.append(kind)
    return groups


def _by_number(name: str) -> tuple[bool, int, str]:
    """Numbers first, 9 before 10."""
    return not name.isdecimal(), int(name) if name.isdecimal() else 0, name
