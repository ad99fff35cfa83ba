"""How far a run is: saved with its weights, and taken up again on any layout."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import composable
from composable.checkpoint.background import BackgroundSaver
from composable.checkpoint.folder import latest, prune, step_folder
from composable.checkpoint.load import load
from composable.checkpoint.remote import Folder, as_folder
from composable.checkpoint.save import save
from composable.checkpoint.shards import Piece
from composable.checkpoint.together import together
from composable.data.loader import DataConfig
from composable.data.packing import row_starts
from composable.data.tokens import Tokens, load_tokens
from composable.models.config import DecoderConfig, RopeConfig
from composable.models.families import flat, to_hugging_face
from composable.models.names import in_file
from composable.moe.config import MoEConfig
from composable.optim.optimizers import optimizer_tensors
from composable.parallel.compose import Composed
from composable.parallel.tied import copy_tied_weight
from composable.recipe import Recipe
from composable.start import check_same_model, start_from
from composable.step import StepResult

STATE = "train_state.json"
VERSION = 1
ORDER_FIELDS = ("seq_len", "document_mask", "packing", "shuffle", "holdout")
"""fields of DataConfig on which rows and their order depend"""
BALANCE_FIELDS = ("model.moe.balance.", "model.moe.exploration.")
"""numbers of the training of experts: they may change in a run, as those of the optimizer may"""
FREE_FIELDS = (*BALANCE_FIELDS, "model.moe.dispatcher", "model.moe.upcycle", "model.moe.granularity")
"""fields of the model that a run may change: those, how tokens travel, and where the run once started from"""


@dataclass(frozen=True)
class TrainState:
    """Counters of a run after `step` optimizer steps."""

    step: int = 0
    samples: int = 0
    """rows consumed: the place in the data order"""
    tokens: int = 0
    valid_tokens: int = 0

    def after(self, result: StepResult) -> "TrainState":
        """The counters one step later."""
        return TrainState(
            self.step + 1,
            self.samples + result.samples,
            self.tokens + result.tokens,
            self.valid_tokens + result.valid_tokens,
        )


@dataclass(frozen=True)
class Corpus:
    """The data of a run, cut into what is trained on and what is held out."""

    train: Tokens
    held_out: Tokens
    fingerprint: str
    """of the whole data set"""

    @staticmethod
    def open(config: DataConfig, vocab_size: int) -> "Corpus":
        """Load and check, on every rank its own; collective.

        Raises:
            ValueError: data that a model of `vocab_size` cannot be trained on, or that differs between ranks.
        """
        found: list[Corpus] = []

        def read() -> str:
            found.append(Corpus._read(config, vocab_size))
            return found[0].fingerprint

        prints = together(None, read)
        if other := [rank for rank, text in enumerate(prints) if text != prints[0]]:
            raise ValueError(
                f"data.path={config.path} is other data on rank {other[0]} than on rank 0; copy it to all nodes"
            )
        return found[0]

    @staticmethod
    def _read(config: DataConfig, vocab_size: int) -> "Corpus":
        tokens = load_tokens(config.path)
        if tokens.vocab_size > vocab_size:
            raise ValueError(
                f"data.path={config.path} has a vocabulary of {tokens.vocab_size} and the model one of {vocab_size}; "
                f"write model.vocab_size={tokens.vocab_size} or more"
            )
        train, held_out = tokens.split(config.holdout)
        return Corpus(train, held_out, tokens.fingerprint())


def checkpoints_of(recipe: Recipe) -> Folder:
    """The folder of a run's checkpoints."""
    return as_folder(recipe.checkpoint.folder) if recipe.checkpoint.folder else recipe.folder / "checkpoints"


def saved_tensors(
    recipe: Recipe, model: Composed, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor | Piece], dict[str, Tensor | Piece]]:
    """Weights and optimizer state of this rank under their names in a checkpoint, to be saved or to be filled."""
    return in_file(model.saved, recipe.model), in_file(optimizer_tensors(None, optimizer), recipe.model)


def save_checkpoint(
    recipe: Recipe,
    model: Composed,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    corpus: Corpus,
    saver: BackgroundSaver | None = None,
) -> Folder:
    """Write the step's checkpoint, and delete older ones beyond `checkpoint.keep`; collective over all ranks.

    With a `saver` both happen in the background, in this order, and it tells when they are done or have failed.
    """
    root = checkpoints_of(recipe)
    folder = step_folder(root, state.step)
    facts = {
        "version": VERSION,
        **dataclasses.asdict(state),
        "steps": recipe.steps,
        "schedule": {**dataclasses.asdict(recipe.schedule), "peak": recipe.peak_lr},
        "rng": {"seed": recipe.seed, "rule": "torch's generators are seeded anew at each step from (seed, step)"},
        "data": {
            "fingerprint": corpus.fingerprint,
            "tokenizer": Path(corpus.train.tokenizer).name,
            **{name: getattr(recipe.data, name) for name in ORDER_FIELDS},
        },
        "layout": {"world": dist.get_world_size(), **dataclasses.asdict(recipe.mesh), "data": recipe.parallel.data},
        "recipe": recipe.options(),
        "versions": {"composable": composable.__version__, "torch": torch.__version__},
    }
    trained = dataclasses.replace(recipe.model, mtp=0)  # layers for multi-token prediction are not
    config = to_hugging_face(trained, recipe.dtype) | borders(corpus.train)
    files: dict[str, str | bytes] = {
        "config.json": json.dumps(config, indent=2) + "\n",
        STATE: json.dumps(facts, indent=2) + "\n",
    }
    weights, moments = saved_tensors(recipe, model, optimizer)
    files |= tokenizer_files(corpus.train)

    def delete_older() -> None:
        prune(root, recipe.checkpoint.keep)

    if saver is not None:
        saver.save(folder, weights, moments, files, writer=recipe.checkpoint.writer, then=delete_older)
    else:
        save(folder, weights, moments, files, writer=recipe.checkpoint.writer)
        together(None, lambda: delete_older() if dist.get_rank() == 0 else None)
    return folder


def borders(tokens: Tokens) -> dict[str, int]:
    """The ids that end a text and, where texts begin with one, that begin it, as config.json names them."""
    begins = tokens.bos is not None and len(tokens) > 0 and int(tokens.tokens[0]) == tokens.bos
    pairs = {"bos_token_id": tokens.bos if begins else None, "eos_token_id": tokens.eos}
    return {name: token for name, token in pairs.items() if token is not None}


def tokenizer_path(tokens: Tokens) -> str:
    """The tokenizer that made the data: as the token file names it or, if that is gone, one beside the token file."""
    beside = Path(tokens.path).parent / "tokenizer.json" if tokens.path else Path()
    gone = tokens.tokenizer not in ("", "byte") and not Path(tokens.tokenizer).exists()
    return str(beside) if gone and beside.is_file() else tokens.tokenizer


def tokenizer_files(tokens: Tokens) -> dict[str, bytes]:
    """The files of the tokenizer that made the data, if it is one of files and they are still there."""
    tokenizer = tokenizer_path(tokens)
    path = Path(tokenizer)
    folder = path if path.is_dir() else path.parent
    if tokenizer in ("", "byte") or not path.exists() or not (folder / "tokenizer.json").is_file():
        return {}
    names = (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
        "chat_template.jinja",
    )
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def starting_point(recipe: Recipe, corpus: Corpus) -> Folder | None:
    """The run's newest complete checkpoint, None if there is none; collective, and quick: no tensor is read.

    Raises:
        ValueError: the checkpoint belongs to another model or another data order, `checkpoint.resume` forbids what is
            there, or `init_from` holds another model.
    """
    root = checkpoints_of(recipe)
    found = together(None, lambda: str(latest(root) or "") if dist.get_rank() == 0 else "")[0]
    how = recipe.checkpoint.resume
    if found and how == "never":
        raise ValueError(f"checkpoint.resume=never, and {found} is a complete checkpoint; choose another --out")
    if found:
        folder = as_folder(found)
        facts = together(None, lambda: json.loads((folder / STATE).read_text()))[dist.get_rank()]
        check_same_run(folder, facts, recipe, corpus)
        return folder
    if how == "must":
        raise ValueError(f"checkpoint.resume=must, and {root} holds no complete checkpoint; check --out")
    if recipe.init_from:
        source = as_folder(recipe.init_from)
        if not all(together(None, source.is_dir)):
            raise ValueError(
                f"init_from={recipe.init_from} is not a folder (on one rank at least); give a checkpoint or "
                "Hugging Face folder that all ranks see"
            )
        if recipe.model.moe is None or not recipe.model.moe.upcycle:
            together(None, lambda: check_same_model(source, recipe.model, recipe.init_missing))
    return None


def resume(
    recipe: Recipe, model: Composed, optimizer: torch.optim.Optimizer, corpus: Corpus
) -> tuple[TrainState, list[str]]:
    """Fill model and optimizer from the run's newest complete checkpoint; collective over all ranks.

    Returns:
        the counters of the checkpoint, those of a new run if there is none; and what the recipe changes in a run.

    Raises:
        ValueError: what `starting_point`, `start_from` or `load` refuse.
    """
    folder = starting_point(recipe, corpus)
    if folder is None:
        return TrainState(), start_from(as_folder(recipe.init_from), recipe, model) if recipe.init_from else []
    facts = together(None, lambda: json.loads((folder / STATE).read_text()))[dist.get_rank()]
    weights, moments = saved_tensors(recipe, model, optimizer)
    load(folder, weights, moments, verify=recipe.checkpoint.verify)
    copy_tied_weight(model.parts)
    state = TrainState(**{field.name: facts[field.name] for field in dataclasses.fields(TrainState)})
    return state, changes_of_course(facts["recipe"], recipe.options())


def changes_of_course(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Fields that change what a resumed run computes from here on: each as it was and is."""
    free = (
        *("mesh", "parallel", "pipeline", "checkpoint", "observe", "validation", "out", "model", "name"),
        *("init_from", "init_missing", "init_model", "init_dequantise"),
    )
    before, found = flat(was), []
    for key, value in flat(now).items():
        layout = key.partition(".")[0] in free and not key.startswith(BALANCE_FIELDS)
        if layout or key in ("data.workers", "data.prefetch", "data.path"):
            continue
        old, new = (tuple(x) if isinstance(x, list) else x for x in (before.get(key, value), value))
        if old != new:
            found.append(f"{key} was {old} and is {new}: the run goes on otherwise from here")
    return found


def check_same_run(folder: Folder, facts: Mapping[str, Any], recipe: Recipe, corpus: Corpus) -> None:
    """Refuse a checkpoint from which this recipe cannot go on exactly.

    Raises:
        ValueError: the fields that differ, what they were and what they are.
    """
    if facts["version"] > VERSION:
        raise ValueError(
            f"{folder / STATE} has version {facts['version']}, and composable {composable.__version__} reads up to "
            f"{VERSION}; update composable"
        )
    was, now = (
        {name: value for name, value in flat(model, "model.").items() if not name.startswith(FREE_FIELDS)}
        for model in (_with_defaults(facts["recipe"]["model"]), json.loads(recipe.to_json())["model"])
    )
    order = {"packing": "cut", **facts["data"]}  # older checkpoints know no other
    was |= {f"data.{name}": order[name] for name in ORDER_FIELDS} | {"seed": facts["recipe"]["seed"]}
    now |= {f"data.{name}": getattr(recipe.data, name) for name in ORDER_FIELDS} | {"seed": recipe.seed}
    was |= {"dtype": facts["recipe"]["dtype"]}
    now |= {"dtype": recipe.dtype}
    was |= {"optimizer.kind": facts["recipe"]["optimizer"]["kind"], "data (fingerprint)": facts["data"]["fingerprint"]}
    now |= {"optimizer.kind": recipe.optimizer.kind, "data (fingerprint)": corpus.fingerprint}
    different = [
        f"{key} was {was.get(key)} and is {now.get(key)}" for key in {**was, **now} if was.get(key) != now.get(key)
    ]
    if different:
        shown = "; ".join(different[:8] + ["..."] * (len(different) > 8))
        raise ValueError(
            f"{folder} belongs to another run: {shown}. Go on with the same values, or start a new run "
            f"from its weights: another --out with --init-from {folder}"
        )


def _with_defaults(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model as an older version wrote it, with what it did not know yet: fields have begun at their default."""
    parts = {"rope": RopeConfig, "moe": MoEConfig}
    filled = {name: {**dataclasses.asdict(kind()), **model[name]} for name, kind in parts.items() if model.get(name)}
    defaults: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(DecoderConfig())))  # tuples become lists
    return {**defaults, **model, **filled}


def last_step(recipe: Recipe, corpus: Corpus, state: TrainState) -> int:
    """`recipe.steps`, or fewer where `data.epochs` ends the data before."""
    if recipe.data.epochs is None:
        return recipe.steps
    rows = recipe.data.epochs * len(row_starts(corpus.train, recipe.data.seq_len, recipe.data.packing))
    left = max(0, -(-(rows - state.samples) // recipe.data.global_batch))
    return min(recipe.steps, state.step + left)
