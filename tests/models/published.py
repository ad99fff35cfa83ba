"""A family's model, made and saved by `transformers`, is the same here: read on a layout, trained a step, written.

`check(ranks, config, folder)` for a tiny configuration of `transformers` is the whole proof on `layouts_of(config)`:
logits, loss and gradients of one step, weights to the bit, and `from_pretrained` of what is saved.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from composable.checkpoint import save
from composable.data.loader import DataConfig, MicroBatch
from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.models.families import from_hugging_face, to_hugging_face
from composable.models.loss import IGNORE
from composable.models.names import in_file
from composable.optim.optimizers import OptimizerConfig, build_optimizer
from composable.parallel.compose import Composed
from composable.parallel.config import Pipeline
from composable.parallel.data import reshard
from composable.recipe import Recipe
from composable.start import start_from
from composable.step import train_step
from composable.train import build_model
from composable.verify import error

ROWS, LENGTH = 4, 16


def layouts_of(config: DecoderConfig) -> list[Mesh]:
    """One rank, and tensor, pipeline and expert parallelism at once."""
    return [Mesh(), Mesh(dp_shard=1, tp=2, pp=2, ep=1 if config.moe is None else 2)]


def made(config: PretrainedConfig, folder: Path, seed: int = 0) -> PreTrainedModel:
    """A random model of `transformers`, in float32, saved in `folder`; no weight has a trivial value."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("correction_bias"))]:
            tensor.add_(0.05 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return model


def batch(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [ROWS, LENGTH]; some labels are ignored."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, vocab_size, (ROWS, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORE
    return tokens[:, :-1].contiguous(), labels


def check(ranks: Callable, config: PretrainedConfig, folder: Path) -> DecoderConfig:
    """The whole proof; gives the configuration as it is read here."""
    theirs = made(config, folder / "theirs")
    ours = from_hugging_face(json.loads((folder / "theirs" / "config.json").read_text()))
    tokens, labels = batch(ours.vocab_size)
    logits = theirs(tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    loss.backward()
    kept = theirs.state_dict()
    gradients = _gradients(theirs, folder / "gradients")
    for number, mesh in enumerate(layouts_of(ours)):
        out = folder / f"layout{number}"
        world = mesh.tp * mesh.pp
        results = ranks(world, trained_on, ours, mesh, folder / "theirs", out, timeout=280)
        for mine, _ in results:  # only a pipeline's last stage has logits
            if mine is not None:
                torch.testing.assert_close(mine, logits.detach(), rtol=0, atol=1e-5)
        assert any(mine is not None for mine, _ in results)
        assert abs(results[0][1] - loss.item()) < 1e-5
        _same_gradients(_read(out / "gradients"), gradients)
        _opens(out / "weights", kept)
        _same_bits(_read(out / "weights"), _read(folder / "theirs"))
    return ours


def trained_on(config: DecoderConfig, mesh: Mesh, source: Path, out: Path) -> tuple[Tensor | None, float]:
    """On every rank: read, save, forward pass, one step; the logits on the last stage, and the loss."""
    data = DataConfig(seq_len=LENGTH, micro_batch=1, global_batch=ROWS)
    recipe = Recipe(
        "published",
        config,
        mesh=mesh,
        pipeline=Pipeline(micro_batches=ROWS if mesh.pp > 1 else 0),
        data=data,
        optimizer=OptimizerConfig(lr=0.0, max_norm=1e9),
    )
    recipe, _ = recipe.resolve(dist.get_world_size())
    model = build_model(recipe, torch.device("cpu"))
    start_from(source, recipe, model)
    save(
        out / "weights",
        in_file(model.saved, config),
        {},
        {"config.json": json.dumps(to_hugging_face(config, recipe.dtype))},
    )
    tokens, labels = batch(config.vocab_size)
    logits = logits_of(model, tokens, config.dim)
    optimizer = build_optimizer(model.parts, recipe.optimizer, only=model.named)
    seen: dict[str, Tensor] = {}
    update = optimizer.step

    def keep() -> None:
        seen.update({name: p.grad for name, p in model.named.items() if p.grad is not None})
        update()

    optimizer.step = keep  # type: ignore[method-assign,assignment]
    batches = [MicroBatch(tokens[i : i + 1], labels[i : i + 1], None, None, torch.tensor([i])) for i in range(ROWS)]
    result = train_step(model, optimizer, batches, step=1, lr=0.0, max_norm=1e9)
    save(out / "gradients", in_file(seen, config), {}, {})
    return logits, result.loss


@torch.no_grad()
def logits_of(model: Composed, tokens: Tensor, dim: int) -> Tensor | None:
    """Logits [B, S, V] of the rank's last stage; hidden states travel from stage to stage. None on other stages."""
    mesh, rank = model.mesh, dist.get_rank()
    positions = torch.arange(tokens.size(1))
    (part,) = model.parts
    stage, x = rank // mesh.stage_ranks, tokens
    if stage > 0:
        x = torch.empty(tokens.size(0), tokens.size(1) // mesh.tp, dim)
        dist.recv(x, rank - mesh.stage_ranks)
    out = part(x, positions=positions)
    reshard(part)
    if stage == mesh.pp - 1:
        return out
    dist.send(out.contiguous(), rank + mesh.stage_ranks)
    return None


def _gradients(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The model's gradients under the names and in the forms that its weights have in files."""
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder)
    model.load_state_dict(state, strict=False)
    return _read(folder)


def _read(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def _same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() <= theirs.keys(), sorted(ours.keys() - theirs.keys())
    assert all("bias" in name for name in theirs.keys() - ours.keys()), sorted(theirs.keys() - ours.keys())
    errors = {name: error(ours[name], theirs[name]) for name in ours}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < 1e-4, f"{worst}: {errors[worst]:.2g}"


def _same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def _opens(folder: Path, state: dict[str, Tensor]) -> None:
    """`from_pretrained` misses nothing, and has the weights from which all began."""
    opened, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    for name, tensor in opened.state_dict().items():
        assert torch.equal(tensor, state[name]), name
