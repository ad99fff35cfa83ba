"""A layout: what of a recipe the planner chooses, as text, as options, and put into a recipe."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import get_args, get_type_hints

from composable.mesh import Mesh
from composable.parallel.config import DataKind, Pipeline
from composable.plan.memory import Planned

MESH = tuple(field.name for field in dataclasses.fields(Mesh))
OTHERS = {
    "micro_batch": "data.micro_batch",
    "data": "parallel.data",
    "recompute": "parallel.recompute",
    "offload": "parallel.offload",
    "schedule": "pipeline.schedule",
    "virtual": "pipeline.virtual",
}
"""word of a layout -> option of a recipe"""
CHOICES: dict[str, tuple[str, ...]] = {
    "data": get_args(DataKind),
    "schedule": get_args(get_type_hints(Pipeline)["schedule"]),
}


@dataclass(frozen=True)
class Layout:
    """Degrees, and what goes with them."""

    mesh: Mesh
    micro_batch: int
    data: str
    recompute: str
    offload: bool = False
    schedule: str = "1F1B"
    virtual: int = 2

    @staticmethod
    def of(recipe: Planned) -> Layout:
        """That of a recipe."""
        return Layout(
            recipe.mesh,
            recipe.data.micro_batch,
            recipe.parallel.data,
            recipe.parallel.recompute,
            recipe.parallel.offload,
            recipe.pipeline.schedule,
            recipe.pipeline.virtual,
        )

    @staticmethod
    def parse(text: str, recipe: Planned) -> Layout:
        """A text such as "tp=8,pp=2,data=zero1,recompute=full,micro_batch=2"; what it does not name is as the recipe
        has it, but degrees, which are 1 and dp_shard what is left. The empty text is the recipe's own layout.

        Raises:
            ValueError: a word that is none, or a value that is no number where one is wanted.
        """
        own = Layout.of(recipe)
        degrees: dict[str, int] = {}
        changes: dict[str, object] = {}
        for part in filter(None, (each.strip() for each in text.split(","))):
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals or name not in (*MESH, *OTHERS):
                raise ValueError(
                    f"{part!r} of the layout: write name=value, the name one of {', '.join((*MESH, *OTHERS))}"
                )
            if name in MESH:
                degrees[name] = _whole(part, value)
            elif name in ("micro_batch", "virtual"):
                changes[name] = _whole(part, value)
            elif name == "offload":
                changes[name] = _truth(part, value)
            else:
                changes[name] = _one_of(part, value, CHOICES[name]) if name in CHOICES else value
        mesh = Mesh(**degrees) if degrees else own.mesh
        return dataclasses.replace(own, mesh=mesh, **changes)  # type: ignore[arg-type]

    def put_into(self, recipe: Planned) -> Planned:
        """The recipe with this layout; to be resolved.

        Raises:
            ValueError: a value that the recipe's parts refuse.
        """
        pipeline = recipe.pipeline
        if self.mesh.pp > 1:
            fits = self.schedule == pipeline.schedule
            pipeline = dataclasses.replace(
                pipeline,
                schedule=self.schedule,  # type: ignore[arg-type]
                virtual=self.virtual,
                split=pipeline.split if fits and recipe.mesh.pp == self.mesh.pp else "",
            )
        return dataclasses.replace(
            recipe,
            mesh=self.mesh,
            data=dataclasses.replace(recipe.data, micro_batch=self.micro_batch),
            parallel=dataclasses.replace(
                recipe.parallel,
                data=self.data,  # type: ignore[arg-type]
                recompute=self.recompute,
                offload=self.offload,
            ),
            pipeline=pipeline,
        )

    def options(self, recipe: Planned) -> list[str]:
        """The words of a command line that give this layout to a recipe: what differs from its own."""
        own, words = Layout.of(recipe), []
        for name in MESH:
            degree, before = getattr(self.mesh, name), getattr(own.mesh, name)
            if degree != before and not (before == -1 and degree > 0):  # -1 takes what is left
                words += [f"--mesh.{name.replace('_', '-')}", str(degree)]
        for name, option in OTHERS.items():
            value = getattr(self, name)
            if value == getattr(own, name) or (name in ("schedule", "virtual") and self.mesh.pp == 1):
                continue
            if name == "offload":
                words += ["--parallel.offload"] if value else ["--parallel.no-offload"]
                continue
            words += [f"--{option.replace('_', '-')}", str(value)]
        return words

    def __str__(self) -> str:
        words = [f"{name} {degree}" for name in MESH if (degree := getattr(self.mesh, name)) != 1]
        words += [f"micro-batch {self.micro_batch}", self.data, f"recompute {self.recompute}"]
        if self.mesh.pp > 1:
            stages = "" if self.schedule in ("GPipe", "1F1B") else f" of {self.virtual} stages"
            words.append(f"{self.schedule}{stages}")
        if self.offload:
            words.append("offload")
        return ", ".join(words)


def _whole(part: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{part!r} of the layout: {text!r} is no whole number") from None


def _one_of(part: str, text: str, known: tuple[str, ...]) -> str:
    if text not in known:
        raise ValueError(f"{part!r} of the layout: write one of {', '.join(known)}")
    return text


def _truth(part: str, text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise ValueError(f"{part!r} of the layout: write offload=True or offload=False")
