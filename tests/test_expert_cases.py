"""What users meet with experts: gradients of the right size, balance that no label touches, empty experts, graphs."""

import dataclasses
import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from composable import verify
from composable.checkpoint.folder import latest
from composable.checkpoint.shards import local_box
from composable.data.loader import DataConfig, MicroBatch
from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.models.loss import IGNORE
from composable.moe.config import Balance, MoEConfig
from composable.observe.metrics import read_metrics
from composable.optim.local import local
from composable.optim.optimizers import OptimizerConfig
from composable.parallel.compose import Composed
from composable.parallel.config import Parallel, Pipeline
from composable.recipe import Recipe, command_line
from composable.recipe import recipe_of as recipe_of_script
from composable.train import train
from composable.verify import Numbers, compare, record, reference_of
from tests.covering import Row, covering
from tests.test_commands import ROOT
from tests.test_commands import run as run_command

MOE = MoEConfig(experts=8, top_k=2, ffn=8)
MODEL = DecoderConfig(
    vocab_size=37, dim=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=24, qk_norm=True, init_std=0.2, moe=MOE
)
SGD = OptimizerConfig(kind="sgd", lr=0.1, weight_decay=0.0, max_norm=0.0)
ADAMW = OptimizerConfig(lr=0.01, max_norm=0.5)


@dataclass(frozen=True)
class Case:
    """What is done to a model and its data before it trains."""

    forced: tuple[tuple[int, ...] | None, ...] = ()
    """of each step, the experts that the router's bias sends every token to; None: the router chooses"""
    zero_head: bool = False
    """logits are 0, so that no gradient of the token loss passes the head"""
    frozen: str = ""
    """a part of the names of the parameters that do not learn"""
    ignored: float = 0.25
    """share of labels without a loss"""


@dataclass(frozen=True)
class Seen:
    """What one rank saw."""

    numbers: Numbers | None
    """on rank 0"""
    moments: float
    """largest moment of an expert that no step forced, in this rank's part"""
    graphs: list[int]
    """compiled so far, after each step"""


def step_rows(step: int, config: DataConfig, vocab_size: int, ignored: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels [global batch, S] of a step: the same rows however they are cut into micro-batches."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, vocab_size, (config.global_batch, config.seq_len + 1), generator=generator)
    hidden = torch.rand(config.global_batch, config.seq_len, generator=generator) < ignored
    return tokens[:, :-1], tokens[:, 1:].masked_fill(hidden, IGNORE)


def rows(ignored: float, step: int, index: int, config: DataConfig, vocab_size: int, _: bool) -> MicroBatch:
    """Micro-batch `index` of a step, in place of `verify.micro_batch`."""
    part = slice(index * config.micro_batch, (index + 1) * config.micro_batch)
    tokens, labels = step_rows(step, config, vocab_size, ignored)
    return MicroBatch(tokens[part].contiguous(), labels[part], None, None, torch.arange(config.global_batch)[part])


@torch.no_grad()
def force(model: Composed, experts: tuple[int, ...] | None) -> None:
    """Let the routers' biases send every token to some experts."""
    for name, parameter in model.named.items():
        if name.endswith("mlp.gate.bias"):
            bias = torch.zeros(parameter.shape, dtype=parameter.dtype)
            bias[list(experts or ())] = 30.0
            local(parameter).copy_(bias[local_box(parameter).slices()])


def unused_moments(model: Composed, optimizer: torch.optim.Optimizer, used: set[int]) -> float:
    """The largest number that AdamW remembers of an expert outside of `used`, of those on this rank."""
    found = [0.0]
    for name, parameter in model.named.items():
        if ".experts." in name:
            first, count = local_box(parameter).offsets[0], local_box(parameter).sizes[0]
            mine = [expert - first for expert in range(first, first + count) if expert not in used]
            state = optimizer.state[parameter]
            found += [local(state[key])[mine].abs().max().item() for key in ("exp_avg", "exp_avg_sq") if mine]
    return max(found)


def graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def run(recipe: Recipe, steps: int, case: Case, backend: str = "") -> Seen:
    """`record` of a case, on the default process group."""
    held, compiled = {}, []
    original_model, original_optimizer = verify.build_model, verify.build_optimizer

    def build(recipe: Recipe, device: torch.device) -> Composed:
        model = original_model(recipe, device)
        with torch.no_grad():
            for name, parameter in model.named.items():
                parameter.requires_grad_(not case.frozen or case.frozen not in name)
                if case.zero_head and name == "lm_head.weight":
                    local(parameter).zero_()

        def train(batches, divisor, step):
            if case.forced:
                force(model, case.forced[(step - 1) % len(case.forced)])
            losses = model.train(batches, divisor, step)
            compiled.append(graphs())
            return losses

        held["model"] = dataclasses.replace(model, train=train)
        return held["model"]

    def optimizer(*args, **kwargs):
        held["optimizer"] = original_optimizer(*args, **kwargs)
        return held["optimizer"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "build_model", build)
        patch.setattr(verify, "build_optimizer", optimizer)
        patch.setattr(verify, "micro_batch", partial(rows, case.ignored))
        if recipe.parallel.compile:
            torch.compiler.reset()
            start = graphs()
            patch.setattr(torch, "compile", partial(torch.compile, backend=backend))
        numbers = record(recipe, steps)
    used = {expert for experts in case.forced for expert in experts or range(recipe.model.moe.experts)}
    adamw = recipe.optimizer.kind == "adamw" and case.forced
    moments = unused_moments(held["model"], held["optimizer"], used) if adamw else 0.0
    return Seen(numbers, moments, [count - start for count in compiled] if recipe.parallel.compile else [])


def recipe_of(mesh: Mesh | None = None, *, micro_batch: int = 2, global_batch: int = 8, **changes) -> Recipe:
    """8 rows a step, of 8 tokens."""
    base = Recipe(
        "case",
        MODEL,
        dtype="float64",
        mesh=mesh or Mesh(),
        data=DataConfig(seq_len=8, micro_batch=micro_batch, global_batch=global_batch),
        optimizer=ADAMW,
    )
    return dataclasses.replace(base, **changes)


# Gradients of experts


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(dp_shard=4),
        Mesh(dp_shard=4, ep=2),
        Mesh(dp_shard=4, ep=4),
        Mesh(dp_replicate=2, dp_shard=2, ep=2),
    ],
    ids=str,
)
def test_expert_and_dense_gradients_have_the_size_of_one_process(mesh, ranks):
    recipe = recipe_of(mesh, dtype="float32", optimizer=SGD)
    ours = ranks(4, run, recipe, 1, Case())[0].numbers
    theirs = ranks(1, run, reference_of(recipe), 1, Case())[0].numbers
    assert ours.gradients[0].keys() == theirs.gradients[0].keys()
    for name, expected in theirs.gradients[0].items():
        gradient = ours.gradients[0][name]
        assert expected.norm() > 0, name
        assert (gradient.norm() / expected.norm()).item() == pytest.approx(1.0, abs=1e-5), name
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)
    start = ranks(
        1, run, dataclasses.replace(reference_of(recipe), optimizer=dataclasses.replace(SGD, lr=0.0)), 1, Case()
    )
    for name, expected in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], expected, rtol=0, atol=1e-6)
        moved = expected - start[0].numbers.weights[name]
        assert moved.abs().max() > 1e-5, name


# The balance loss alone


def balanced(coefficient: float, **changes) -> Recipe:
    """A recipe whose router learns of the frequency-times-probability loss, on one process until a mesh is given."""
    scope, micro_batch = changes.pop("scope", "micro_batch"), changes.pop("micro_batch", 2)
    balance = changes.pop("balance", Balance(switch=coefficient, scope=scope))
    model = dataclasses.replace(MODEL, moe=dataclasses.replace(MOE, balance=balance))
    return recipe_of(micro_batch=micro_batch, model=model, optimizer=dataclasses.replace(SGD, lr=1e-9), **changes)


def balance_gradients(recipe: Recipe, ranks, ignored: float = 0.25) -> dict[str, torch.Tensor]:
    """Of everything but the head, whose zeros keep the token loss from it."""
    numbers = ranks(recipe.mesh.world, run, recipe, 1, Case(zero_head=True, ignored=ignored))[0].numbers
    return {name: value for name, value in numbers.gradients[0].items() if name != "lm_head.weight"}


LAYOUTS = {
    "dp 2": dict(mesh=Mesh(dp_shard=2)),
    "dp 4": dict(mesh=Mesh(dp_shard=4)),
    "tp 2": dict(mesh=Mesh(dp_shard=1, tp=2)),
    "ep 2": dict(mesh=Mesh(dp_shard=2, ep=2)),
    "pp 2": dict(mesh=Mesh(dp_shard=1, pp=2), pipeline=Pipeline("1F1B")),
    "pp 2, 2 passes": dict(mesh=Mesh(dp_shard=1, pp=2), pipeline=Pipeline("1F1B", micro_batches=2)),
    "recomputed": dict(mesh=Mesh(dp_shard=2, ep=2), parallel=Parallel(recompute="full")),
}
"""of the same four micro-batches: one process accumulates 4, two data ranks 2, four 1"""


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-9, atol=1e-15, msg=name)


@pytest.fixture(scope="module")
def alone(pool):
    """The balance loss's gradients on one process."""
    return balance_gradients(dataclasses.replace(balanced(1.0), mesh=Mesh(dp_shard=1)), pool.run)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_gradient_of_the_balance_loss_is_the_same_on_every_layout(layout, alone, ranks):
    equal(balance_gradients(balanced(1.0, **layout), ranks), alone)


def test_of_a_layer_only_the_router_learns_of_its_balance_loss(alone):
    for name, gradient in alone.items():
        if "layers.1.mlp.gate" in name or "layers.0.mlp.gate" in name:
            assert gradient.norm() > 1e-6, name
        if "layers.1.mlp.experts" in name or name == "model.norm.weight":  # after it comes the head alone
            assert not gradient.any(), name


@pytest.mark.parametrize("ignored", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("mesh", [Mesh(dp_shard=1), Mesh(dp_shard=4, ep=2)], ids=["one process", "ep 2 of 4"])
def test_ignored_labels_do_not_touch_the_balance_loss(ignored, mesh, alone, ranks):
    equal(balance_gradients(balanced(1.0, mesh=mesh), ranks, ignored), alone)


@pytest.mark.parametrize("mesh", [Mesh(dp_shard=1), Mesh(dp_shard=2, ep=2)], ids=["one process", "ep 2"])
def test_twice_the_coefficient_is_exactly_twice_the_gradient(mesh, ranks):
    once, twice = (balance_gradients(balanced(c, mesh=mesh), ranks) for c in (1.0, 2.0))
    for name, gradient in once.items():
        assert torch.equal(twice[name], 2 * gradient), name


SPLITS = [  # rows of a micro-batch, mesh
    (8, Mesh(dp_shard=1)),
    (1, Mesh(dp_shard=1)),
    (4, Mesh(dp_shard=2, ep=2)),
    (2, Mesh(dp_shard=4, ep=2)),
    (1, Mesh(dp_shard=2, tp=2, ep=4)),
    (2, Mesh(dp_shard=1, pp=2)),
]


def test_a_loss_of_global_scope_does_not_depend_on_how_a_step_is_cut(ranks):
    every = Balance(switch=1.0, kl=0.5, sequence=0.5, z=0.1, scope="global")
    found = []
    for micro_batch, mesh in SPLITS:
        recipe = balanced(1.0, micro_batch=micro_batch, mesh=mesh, balance=every)
        found.append(balance_gradients(recipe, ranks))
    for other in found[1:]:
        equal(other, found[0])
    by_micro_batch = dataclasses.replace(every, scope="micro_batch")
    whole, cut = (
        balance_gradients(balanced(1.0, micro_batch=n, mesh=Mesh(dp_shard=1), balance=by_micro_batch), ranks)
        for n in (8, 1)
    )
    equal(whole, found[0])
    name = "model.layers.0.mlp.gate.weight"
    assert (cut[name] - whole[name]).abs().max() > 1e-6  # the split matters where the scope says so


def test_losses_that_ask_for_no_load_of_the_step_cost_no_pass_that_counts_it():
    assert Balance(switch=0.1, scope="global").counts_step
    assert Balance(kl=0.1, scope="global").counts_step
    assert not Balance(switch=0.1).counts_step
    assert not Balance(sequence=0.1, z=0.1, scope="global").counts_step


# Experts without a token

FORCED = {
    "first": ((0, 1),),
    "last": ((6, 7),),
    "alternating": ((0, 1), (6, 7)),
    "one token": (),
}
EDGES = [
    {"kind": kind, "ep": ep, "recompute": recompute, "accumulate": accumulate}
    for kind, ep, recompute, accumulate in itertools.product(FORCED, (2, 4), ("none", "full"), (1, 2))
]
EDGES_BY_DEFAULT = covering(EDGES, 2)


def edge_recipe(row: Row) -> Recipe:
    single = row["kind"] == "one token"
    moe = dataclasses.replace(MOE, router_bias=True, top_k=1 if single else 2, balance=Balance(switch=0.01, z=0.001))
    return recipe_of(
        Mesh(dp_shard=row["ep"], ep=row["ep"]),
        micro_batch=1,
        global_batch=row["ep"] * row["accumulate"],
        model=dataclasses.replace(MODEL, moe=moe),
        parallel=Parallel(recompute=row["recompute"]),
    )


def edge_id(row: Row) -> str:
    return ", ".join(f"{value}" if name == "kind" else f"{name} {value}" for name, value in row.items())


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=edge_id(row), marks=[] if row in EDGES_BY_DEFAULT else [pytest.mark.slow]) for row in EDGES],
)
def test_experts_and_ranks_without_a_token_go_along(row, ranks):
    recipe, case = edge_recipe(row), Case(FORCED[row["kind"]], ignored=0.0)
    if row["kind"] == "one token":
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, seq_len=1))
    seen = ranks(row["ep"], run, recipe, 6, case, timeout=60)
    reference = ranks(1, run, reference_of(recipe), 6, case, timeout=60)[0]
    ours = seen[0].numbers
    result = compare(ours, reference.numbers, 1e-9)
    assert not result.first, f"{result.first}; {result.errors}"
    assert all(part.moments == 0.0 for part in [*seen, reference])
    for step, gradients in enumerate(ours.gradients):
        used = set(case.forced[step % len(case.forced)]) if case.forced else None
        stacks = [value for name, value in gradients.items() if ".experts." in name]
        assert len(stacks) == 6  # none is missing
        for stack in stacks:
            moved = {expert for expert in range(8) if stack[expert].any()}
            assert moved == used if used else len(moved) <= len(seen) * row["accumulate"]


# Compiled blocks

COMPILED = {
    "one process": Mesh(dp_shard=1),
    "fsdp 2": Mesh(dp_shard=2),
    "ep 2": Mesh(dp_shard=2, ep=2),
    "tp 2": Mesh(dp_shard=1, tp=2),
}
SHIFTING = (None, (0, 1), (6, 7), (2, 7), None, (7, 2), (3, 0), (1, 5), None, (0, 1), (4, 6), None)
KINDS = {
    "softmax": dataclasses.replace(MOE, router_bias=True, balance=Balance(switch=0.01, z=0.001)),
    "groups": dataclasses.replace(
        MOE,
        router_bias=True,
        score="sigmoid",
        correction=True,
        groups=4,
        groups_kept=2,
        scale=2.5,
        first_dense=1,
        shared_ffn=8,
        balance=Balance(sequence=0.01, bias_rate=0.01),
    ),
}


@pytest.mark.parametrize(
    ("mesh", "kind", "backend"),
    [
        pytest.param(
            mesh,
            kind,
            backend,
            id=f"{name}, {kind}, {backend}",
            marks=[] if (name, kind, backend) == ("ep 2", "softmax", "aot_eager") else [pytest.mark.slow],
        )
        for (name, mesh), kind, backend in itertools.product(COMPILED.items(), KINDS, ("aot_eager", "inductor"))
        if backend == "aot_eager" or (name, kind) in (("one process", "softmax"), ("ep 2", "groups"))
    ],
)
def test_compiled_blocks_follow_a_shifting_routing_without_new_graphs(mesh, kind, backend, ranks):
    model = dataclasses.replace(MODEL, moe=KINDS[kind])
    eager = recipe_of(mesh, dtype="float32", model=model)
    compiled = dataclasses.replace(eager, parallel=Parallel(compile=True))
    case = Case(SHIFTING)
    seen = ranks(mesh.world, run, compiled, 12, case, backend, timeout=280)
    expected = ranks(mesh.world, run, eager, 12, case)[0].numbers
    assert seen[0].numbers.losses == pytest.approx(expected.losses, abs=1e-4)
    assert seen[0].numbers.norms == pytest.approx(expected.norms, rel=1e-3)
    for part in seen:
        assert part.graphs[0] > 0
        assert part.graphs[3] == part.graphs[-1], part.graphs
        assert part.graphs[-1] <= 20 * MODEL.layers, part.graphs


@pytest.mark.parametrize(
    ("mesh", "recompute"),
    [
        (Mesh(dp_shard=1, tp=2, ep=2), "full"),
        pytest.param(Mesh(dp_shard=2, ep=2), "full", marks=pytest.mark.slow),
        pytest.param(Mesh(dp_shard=1, tp=2, etp=2), "every:2", marks=pytest.mark.slow),
        pytest.param(Mesh(dp_shard=1, cp=2, ep=2), "full", marks=pytest.mark.slow),
        pytest.param(Mesh(dp_shard=2, ep=2), "selective", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_recomputed_blocks_are_compiled_around_experts_and_collectives(mesh, recompute, ranks):
    recipe = recipe_of(mesh)
    compiled = dataclasses.replace(recipe, parallel=Parallel(recompute=recompute, compile=True))
    seen = ranks(mesh.world, run, compiled, 2, Case(), "aot_eager", timeout=280)
    result = compare(seen[0].numbers, ranks(1, run, reference_of(recipe), 2, Case())[0].numbers, 1e-9)
    assert not result.first, result.first
    assert min(part.graphs[0] for part in seen) >= 4  # before and after the attention's sums and the experts


def test_that_selective_recomputation_is_not_compiled_over_tensor_ranks_is_said():
    for recompute, said in (("selective", True), ("full", False)):
        parallel = Parallel(recompute=recompute, compile=True)
        _, warnings = recipe_of(Mesh(dp_shard=1, tp=2), parallel=parallel).resolve(2)
        assert any("runs uncompiled" in warning for warning in warnings) == said


# The gradient norm


CLIPPED = [Mesh(dp_shard=1, tp=2), Mesh(dp_shard=2, tp=2), Mesh(dp_shard=4, ep=2), Mesh(dp_shard=2, tp=2, ep=4)]
FROZEN = ("", "layers.0.", ".experts.", "mlp.gate.")


@pytest.mark.parametrize(
    ("mesh", "frozen"),
    [
        pytest.param(mesh, frozen, marks=[] if not frozen or turn % 4 == FROZEN.index(frozen) else [pytest.mark.slow])
        for turn, mesh in enumerate(CLIPPED)
        for frozen in FROZEN
    ],
    ids=str,
)
def test_the_norm_of_a_model_with_experts_and_frozen_parts_is_that_of_one_process(mesh, frozen, ranks):
    case = Case(frozen=frozen)
    optimizer = dataclasses.replace(ADAMW, kind="sgd", lr=0.5, max_norm=0.05)
    model = dataclasses.replace(MODEL, moe=dataclasses.replace(MOE, balance=Balance(switch=0.1)))
    recipe = recipe_of(mesh, model=model, optimizer=optimizer)
    ours = ranks(mesh.world, run, recipe, 3, case)[0].numbers
    theirs = ranks(1, run, reference_of(recipe), 3, case)[0].numbers
    result = compare(ours, theirs, 1e-9)
    assert not result.first, result.first
    assert min(theirs.norms) > 0.05  # clipped in each step
    assert not [name for name in ours.gradients[0] if frozen and frozen in name]


# Upcycling

SIZES = [
    *("--model.dim", "16", "--model.layers", "2", "--model.heads", "2", "--model.kv-heads", "1", "--model.head-dim"),
    *("8", "--model.ffn", "24", "--model.qk-norm", "--data.seq-len", "16", "--data.global-batch", "8"),
    *("--data.micro-batch", "2", "--validation.every", "1", "--validation.steps", "2", "--observe.every", "1"),
]


def train_script(script: str, args: list[str]) -> None:
    """A recipe script with options, in this process."""
    train(command_line(recipe_of_script(ROOT / script), args))


def measured(out: Path) -> tuple[float, float]:
    """The last training loss and the last validation loss of a run."""
    values = list(read_metrics(out / "metrics.jsonl"))
    return tuple([line[key] for line in values if key in line][-1] for key in ("loss", "validation_loss"))


@pytest.mark.parametrize("granularity", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_upcycled_run_starts_at_the_losses_of_the_dense_one(granularity, ranks, tmp_path):
    ranks(1, train_script, "recipes/dense_debug.py", [*SIZES, "--steps", "2", "--out", str(tmp_path / "dense")])
    source = latest(tmp_path / "dense" / "checkpoints")
    still = [*SIZES, "--steps", "1", "--optimizer.lr", "0", "--init-from", str(source)]
    ranks(1, train_script, "recipes/dense_debug.py", [*still, "--out", str(tmp_path / "again")])
    upcycled = [*still, "--mesh.ep", "2", "--model.moe.upcycle", "--out", str(tmp_path / "experts")]
    upcycled += ["--model.moe.granularity", str(granularity), "--model.moe.ffn", str(24 // granularity)]
    if granularity == 1:  # as people type it
        said = run_command("recipes/moe_debug.py", 2, *upcycled)
        assert f"8 experts a layer, each a copy of the dense one, of {source}" in said
    else:
        ranks(2, train_script, "recipes/moe_debug.py", upcycled)
    loss, validation_loss = measured(tmp_path / "experts")
    assert validation_loss == pytest.approx(measured(tmp_path / "dense")[1], abs=1e-6)
    assert (loss, validation_loss) == pytest.approx(measured(tmp_path / "again"), abs=1e-6)
