"""Nested state dicts, as people save them -> weights and state of the optimizer, under our names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from composable.checkpoint.format import TensorSpec
from composable.checkpoint.formats.source import Entry, number_entry
from composable.checkpoint.rewrite import Unit

WEIGHTS = ("model", "state_dict", "model_state_dict", "module")
OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict")
WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put before each name
SHOWN = 5

Path = tuple[str | int, ...]
Leaf = tuple[Path, Any]  # the keys that lead to it, and an `Entry`, or any other value


def leaves(values: object, path: Path = ()) -> Iterator[Leaf]:
    """What lies in nested dictionaries and lists."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from leaves(value, (*path, key if isinstance(key, int) else str(key)))
    elif isinstance(values, (list, tuple)):
        for number, value in enumerate(values):
            yield from leaves(value, (*path, number))
    else:
        yield path, values


def nested(sections: Mapping[str, Iterable[str]]) -> dict[str, tuple[Path, str]]:
    """Where we put our tensors: key by which they are known -> (the keys that lead to it, its section).

    Weights lie at `model.<name>`, the optimizer's state `<weight>.<state>` at `optimizer.state.<weight>.<state>`, each
    name being one key.
    """
    places: dict[str, tuple[Path, str]] = {}
    for section, names in sections.items():
        for name in names:
            weight, _, state = name.rpartition(".")
            path = ("model", name) if section == "weights" else ("optimizer", "state", weight, state)
            places[".".join(path)] = (path, section)
    return places


def arranged(found: Sequence[Leaf], *, weights_only: bool = False) -> tuple[dict[str, dict[str, Entry]], list[str]]:
    """Section -> name -> tensor, and what is left out.

    A state dict is flat (all its tensors are weights), or has weights under one of the keys of `WEIGHTS` and the
    optimizer's state under one of `OPTIMIZER`, both possibly in one dictionary more. That state is by the weights'
    names, or by numbers, as `torch.optim` has it: those of one group of parameters are the weights in their order. With
    `weights_only` it is not looked at.

    Raises:
        ValueError: no dictionary; two tensors of one name; states by numbers that are not those of the weights.
    """
    if any(not path for path, _ in found):
        raise ValueError("what was saved is no dictionary of tensors; save a state dict")
    while found and len({path[0] for path, _ in found if path}) == 1 and all(len(path) > 1 for path, _ in found):
        if found[0][0][0] in (*WEIGHTS, *OPTIMIZER):
            break
        found = [(path[1:], value) for path, value in found]
    parted = any(len(path) > 1 and path[0] in (*WEIGHTS, *OPTIMIZER) for path, _ in found)
    weights: dict[str, Entry] = {}
    states: list[Leaf] = []
    left: list[str] = []
    for path, value in found:
        if parted and path[0] in OPTIMIZER and len(path) > 1:
            if not weights_only:
                states.append((path[1:], value))
        elif isinstance(value, Entry) and (not parted or (path[0] in WEIGHTS and len(path) > 1)):
            _add(weights, ".".join(map(str, path[1:] if parted else path)), value)
        else:
            left.append(".".join(map(str, path)))
    for wrapper in WRAPPERS:
        if weights and all(name.startswith(wrapper) for name in weights):
            weights = {name.removeprefix(wrapper): _named(e, name.removeprefix(wrapper)) for name, e in weights.items()}
            states = [(tuple(_unwrapped(key, wrapper) for key in path), value) for path, value in states]
    optimizer, more = _optimizer(states, weights)
    left += more
    shown = ", ".join(left[:SHOWN]) + (", ..." if len(left) > SHOWN else "")
    return {"weights": weights, "optimizer": optimizer}, [f"left out: {shown}"] if left else []


def _optimizer(states: Sequence[Leaf], weights: Mapping[str, Entry]) -> tuple[dict[str, Entry], list[str]]:
    groups = {str(path[1]) for path, _ in states if path[0] == "param_groups" and len(path) > 1}
    numbered = sorted({int(path[1]) for path, _ in states if _is_numbered(path)})
    names = list(weights)
    if numbered and (len(groups) > 1 or numbered != list(range(len(names)))):
        raise ValueError(
            f"the optimizer's state is by numbers, {len(numbered)} of them in {max(1, len(groups))} groups for "
            f"{len(names)} weights, so that nothing says whose it is; leave it out with --weights-only"
        )
    optimizer: dict[str, Entry] = {}
    left: list[str] = []
    for path, value in states:
        weight = names[int(path[1])] if _is_numbered(path) else ""
        name = ".".join(map(str, path[2:] if weight else path)).removeprefix("state.")
        name = f"{weight}.{name}" if weight else name
        if name.startswith("param_groups"):
            if "optimizer.param_groups" not in left:
                left.append("optimizer.param_groups")
        elif not str(path[0]).startswith("state") and name.rpartition(".")[0] not in weights:
            left.append(f"optimizer.{name}")
        elif isinstance(value, Entry):
            if weight and value.spec.shape and value.spec.shape != weights[weight].spec.shape:
                raise ValueError(
                    f"the optimizer's state {path[1]} has the shape {value.spec.shape}, and the weight of that number, "
                    f"{weight}, {weights[weight].spec.shape}; leave the state out with --weights-only"
                )
            _add(optimizer, name, value)
        elif isinstance(value, (int, float)):
            _add(optimizer, name, number_entry(name, value))
        else:
            left.append(f"optimizer.{name}")
    return optimizer, left


def _unwrapped(key: str | int, wrapper: str) -> str | int:
    return key if isinstance(key, int) else key.removeprefix(wrapper).replace(f"state.{wrapper}", "state.", 1)


def _is_numbered(path: Path) -> bool:
    return len(path) > 2 and path[0] == "state" and str(path[1]).isdecimal()


def _add(entries: dict[str, Entry], name: str, entry: Entry) -> None:
    if name in entries:
        raise ValueError(f"{name} stands twice, under several keys; save a state dict in which names are one's own")
    entries[name] = _named(entry, name)


def _named(entry: Entry, name: str) -> Entry:
    """The same tensor under another name."""
    old = entry.spec.name
    if old == name:
        return entry
    return dataclasses.replace(
        entry,
        spec=TensorSpec(name, entry.spec.dtype, entry.spec.shape),
        units=lambda chunk: (Unit(name, unit.box, unit.digest) for unit in entry.units(chunk)),
        boxes=lambda unit, chunk: entry.boxes(Unit(old, unit.box, unit.digest), chunk),
        values=lambda unit, chunk: entry.values(Unit(old, unit.box, unit.digest), chunk),
    )
