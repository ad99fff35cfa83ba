"""A recipe: everything that a run is, as one frozen value with a command line over it."""

import argparse
import dataclasses
import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from composable.checkpoint.plan import Writer
from composable.checkpoint.remote import as_folder, is_url
from composable.data.loader import DataConfig, accumulation
from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.models.families import from_hugging_face
from composable.models.upcycle import check_upcycle
from composable.observe.routing import RoutingWatch
from composable.optim import schedules
from composable.optim.optimizers import OptimizerConfig
from composable.optim.schedules import ScheduleConfig, scale_learning_rate
from composable.parallel.architecture import Architecture, decoder_architecture
from composable.parallel.compose import Shape
from composable.parallel.config import Parallel, Pipeline
from composable.parallel.context import check_context
from composable.parallel.expert import check_experts
from composable.parallel.tensor import check_tensor


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved, and whether it goes on from what is there."""

    every: int = 500
    """steps between checkpoints; 0: only the last step is saved"""
    keep: int = 2
    """newest complete checkpoints that are kept; 0: all"""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: go on from the newest complete checkpoint in --out if there is one; never: refuse if there is one; must:
    refuse if there is none"""
    verify: bool = True
    """check checksums when resuming"""
    folder: str = ""
    """where checkpoints lie, if not in the run folder, those of this run alone; may be a URL (s3://bucket/run), which
    needs the package that fsspec has for its protocol"""
    writer: Writer = "shared"
    """shared: all ranks write into common files, the same in every layout; per_rank: each rank writes files of its own,
    for URLs and file systems without ranged writes"""
    asynchronous: bool = False
    """go on training once what is saved is copied to host memory (as large as each rank's share of a checkpoint), and
    write it in the background"""


@dataclass(frozen=True)
class ValidationConfig:
    """When and on how much held-out data the loss is measured."""

    every: int = 0
    """steps between validations (the last step is always one); 0: never"""
    steps: int = 8
    """global batches of held-out rows, always the same; 0: all of them"""


@dataclass(frozen=True)
class ObserveConfig:
    """What is logged, and how often."""

    every: int = 1
    """steps between lines of metrics.jsonl; a line's rates are over all of them"""
    profile: int = 0
    """first step of a profiler trace; 0: none"""
    profile_steps: int = 3
    """steps in the trace"""
    memory_snapshot: int = 0
    """step after which each rank writes what holds its memory; 0: none"""
    routing: RoutingWatch = field(default_factory=RoutingWatch)
    """of layers with experts"""


@dataclass(frozen=True)
class Recipe:
    """What is trained, on which data, how, and on which mesh."""

    name: str
    """names the run folder"""
    model: DecoderConfig
    steps: int = 1000
    """optimizer steps of the whole run, those before a resume included"""
    seed: int = 1234
    """of initial weights and data order"""
    out: str = ""
    """run folder; runs/<name> if empty. A second start with the same folder resumes"""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """of parameters and computation; float64 is for proofs"""
    init_from: str = ""
    """checkpoint or Hugging Face folder whose weights the run starts from, with a fresh optimizer; may be a URL"""
    init_model: bool = False
    """the model is what config.json of init_from says, in place of this recipe's; options of model. change that one"""
    init_missing: tuple[str, ...] = ()
    """names of weights, or patterns such as *.q_norm.weight, that init_from may lack: they keep their initial values"""
    init_dequantise: bool = False
    """read weights of init_from that are quantised in blocks (fp8 as DeepSeek-V3's, MXFP4 as gpt-oss's) as numbers"""
    shrink: bool = False
    """train a small twin: the same kinds of layers, dimensions of the mesh, schedule and files, on as many ranks as
    there are, for 20 steps in float32 on the sample corpus; its run folder ends in -shrink. Other options hold too"""
    deterministic: bool = False
    """only kernels that give the same bits on every run (CPU runs do without it)"""
    mesh: Mesh = field(default_factory=Mesh)
    parallel: Parallel = field(default_factory=Parallel)
    pipeline: Pipeline = field(default_factory=Pipeline)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    foreign: Annotated[Callable[["Recipe"], Architecture] | None, tyro.conf.Suppress] = None
    """builds a model that is not ours, of the sizes in `model` (composable.parallel.foreign); no option"""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.out or f"runs/{self.name}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch has it."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def architecture(self) -> Architecture:
        """The model as `compose` takes it."""
        if self.foreign is not None:
            return self.foreign(self)
        return decoder_architecture(self.model, self.torch_dtype, self.parallel.loss_chunk)

    @property
    def shape(self) -> Shape:
        """What passes through the model at a time; the mesh must be resolved."""
        data = self.data
        return Shape(data.micro_batch, data.seq_len, accumulation(data, self.mesh.data_ranks))

    @property
    def peak_lr(self) -> float:
        """The learning rate's peak, scaled to the global batch if the recipe asks for it."""
        config = self.optimizer
        return scale_learning_rate(config.lr, self.data.global_batch, config.reference_batch, config.scale)

    def resolve(self, world: int) -> tuple["Recipe", list[str]]:
        """Check everything that needs no device and fill in the mesh; also gives warnings.

        Raises:
            ValueError: what does not go together, with the rule and the nearest right value.
        """
        self._check_numbers()
        mesh = self.mesh.resolve(world, replicate=self.parallel.data == "ddp")
        self.parallel.check(mesh, self.model.layers)
        check_experts(self.model.moe, mesh)
        if self.model.moe is not None and self.model.moe.upcycle:
            check_upcycle(self.model)
        check_tensor(self.model, mesh.tp, self.data.seq_len // mesh.cp)
        if mesh.cp > 1:
            model = self.model
            check_context(self.data.seq_len, mesh.cp, mesh.tp, model.heads, model.kv_heads, self.parallel.context)
        if mesh.pp > 1:
            accumulation(self.data, mesh.data_ranks, self.pipeline.micro_batches or 1)
        count = accumulation(self.data, mesh.data_ranks)
        warnings = self.pipeline.check(
            mesh.pp, self.pipeline.micro_batches or count, self.model.layers, whole_blocks=self.parallel.whole_blocks
        )
        moe = self.model.moe
        if moe is not None and moe.top_k == 1 and (moe.normalise or moe.score == "topk_softmax"):
            warnings.append(
                "model.moe.top_k=1 with weights that sum to one: a token's only weight is 1 whatever its score, so the "
                "router learns nothing from the model's loss; write model.moe.normalise=False and another score than "
                "topk_softmax"
            )
        warnings += schedules.check(self.schedule, max(self.steps, 1))
        if self.data.seq_len > self.model.max_length:
            warnings.append(f"data.seq_len={self.data.seq_len} is longer than model.max_length={self.model.max_length}")
        if self.parallel.compile and self.parallel.recompute == "selective" and mesh.tp * mesh.cp > 1:
            warnings.append(
                "parallel.compile with parallel.recompute=selective: what is recomputed exchanges data over the ranks "
                "of tp and cp, which no one graph holds, so it runs uncompiled; recompute=full compiles it"
            )
        return dataclasses.replace(self, mesh=mesh), warnings

    def _check_numbers(self) -> None:
        """Refuse what is wrong on any mesh."""
        for name in (
            *("steps", "checkpoint.every", "checkpoint.keep", "validation.every", "validation.steps"),
            *("observe.profile", "observe.profile_steps", "observe.memory_snapshot"),
        ):
            value: Any = self
            for part in name.split("."):
                value = getattr(value, part)
            if value < 0:
                raise ValueError(f"{name}={value}: a number of steps or checkpoints is 0 or more")
        if "://" in self.out:
            raise ValueError(
                f"out={self.out} is a URL, and logs are written to a folder of this machine; give one, and the URL as "
                "checkpoint.folder"
            )
        as_folder(self.checkpoint.folder)
        if is_url(self.checkpoint.folder) and self.checkpoint.writer == "shared":
            raise ValueError(
                f"checkpoint.folder={self.checkpoint.folder} is a store, which takes no ranged writes into common "
                "files; write checkpoint.writer=per_rank"
            )
        if self.optimizer.lr < 0:
            raise ValueError(f"optimizer.lr={self.optimizer.lr}: a learning rate is not negative")
        if self.validation.every and not self.data.holdout:
            raise ValueError("validation.every needs data.holdout above 0; write validation.every=0 to do without")
        if self.observe.every < 1:
            raise ValueError(f"observe.every={self.observe.every}: 1 logs every step")
        if self.dtype == "float64" and self.parallel.precision != "none":
            raise ValueError("dtype=float64 is for proofs, and parallel.precision casts it away; leave one of them out")
        if self.model.moe is not None and self.model.moe.upcycle and not self.init_from:
            raise ValueError("model.moe.upcycle starts experts from a dense model: give its checkpoint as --init-from")
        if self.model.moe is not None and self.model.moe.upcycle and self.init_missing:
            raise ValueError("init_missing with moe.upcycle: every weight is taken from the dense model; leave it out")
        if self.foreign is not None:
            self._check_foreign()

    def _check_foreign(self) -> None:
        """Refuse options that only our own decoder knows."""
        if self.parallel.loss_chunk:
            raise ValueError("parallel.loss_chunk is our own decoder's; write 0 for a model of another library")
        if self.model.moe is not None:
            raise ValueError("model.moe is our own decoder's; leave it out for a model of another library")
        if self.model.kv_heads % max(self.mesh.tp, 1):
            raise ValueError(
                f"model.kv_heads={self.model.kv_heads} with mesh.tp={self.mesh.tp}: torch's tensor styles share no "
                "head, so tp must divide the heads of keys and values of a foreign model"
            )

    def options(self) -> dict[str, Any]:
        """All fields that are options, as nested dictionaries."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "foreign"}

    def to_json(self) -> str:
        """All options, as recipe.json holds them."""
        return json.dumps(self.options(), indent=2) + "\n"


def recipe_of(script: Path) -> Recipe:
    """The value `RECIPE` of a recipe script, which is run as a module to get it.

    Raises:
        ValueError: there is no such file, or it has no RECIPE.
    """
    if not script.is_file():
        raise ValueError(f"{script} is not a file; give the path of a recipe script, such as recipes/dense_debug.py")
    recipe = runpy.run_path(str(script), run_name="recipe").get("RECIPE")
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{script} has no RECIPE of type Recipe; the scripts in recipes/ show how one is written")
    return recipe


def with_init_model(recipe: Recipe, words: Sequence[str]) -> Recipe:
    """The recipe with the model of `init_from`, if `init_model` is asked for: before options of the model are read.

    Where both have experts, the recipe's options of their training stay.

    Raises:
        ValueError: there is no such folder, or its model is not supported.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--init-from", "--init_from", default=recipe.init_from)
    parser.add_argument("--init-model", "--init_model", action="store_true", default=recipe.init_model)
    told, _ = parser.parse_known_args(words)
    if not told.init_model:
        return recipe
    path = as_folder(told.init_from) / "config.json"
    if not told.init_from or not path.is_file():
        raise ValueError(f"init_model takes the model of init_from, and {path} is not there; give --init-from FOLDER")
    model, experts = from_hugging_face(json.loads(path.read_bytes())), recipe.model.moe
    if model.moe is not None and experts is not None:
        options = {name: getattr(experts, name) for name in ("balance", "capacity", "exploration", "dispatcher")}
        model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, **options))
    return dataclasses.replace(recipe, model=model)


def command_line(recipe: Recipe, args: list[str] | None = None) -> Recipe:
    """The recipe with the options of the command line over it: every field is one.

    Args:
        args: instead of `sys.argv[1:]`.

    Raises:
        ValueError: `shrink`, which is for scripts that run `composable.train.main`; with_init_model's.
    """
    words = sys.argv[1:] if args is None else args
    told = options_over(with_init_model(recipe, words), words)
    if told.shrink:
        raise ValueError("--shrink makes a small twin where a recipe script trains; leave it out here")
    return told


def options_over(recipe: Recipe, words: Sequence[str]) -> Recipe:
    """The recipe with options over it, as they are written on a command line."""
    if {"-h", "--help"} & set(words) and os.environ.get("RANK", "0") != "0":
        raise SystemExit(0)  # once is enough
    return tyro.cli(
        Recipe,
        default=recipe,
        args=words,
        description=f"Train {recipe.name}; start it with torchrun.",
        config=(tyro.conf.AvoidSubcommands,),
    )
