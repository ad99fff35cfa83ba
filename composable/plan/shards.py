"""Which part of every parameter a rank holds, by arithmetic: what `compose` makes of a configuration.

Shapes are those of the rank that holds the most: the first of each group, as pieces of uneven cuts get smaller.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.parallel.config import Parallel
from composable.parallel.split import Stage

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """A parameter after tensor and expert parallelism, before data ranks cut it."""

    shape: Shape
    expert: bool = False
    replicated: bool = False
    """each tensor rank holds all of it, and gradients are summed over them"""

    @property
    def elements(self) -> int:
        return prod(self.shape)


def rows(size: int, ranks: int) -> int:
    """Of `size` rows in `ranks` pieces, those of the first."""
    return -(-size // ranks)


def block_weights(config: DecoderConfig, mesh: Mesh, layer: int) -> list[Weight]:
    """Of one block."""
    norms = [Weight((config.dim,), replicated=True)] * 2
    attention = _latent_weights(config, mesh) if config.latent else _attention_weights(config, mesh)
    if config.moe is None or layer not in config.expert_layers:
        return norms + attention + _swiglu_weights(config.dim, config.ffn, config.mlp_bias, mesh.tp)
    return norms + attention + _expert_layer_weights(config, mesh)


def _attention_weights(config: DecoderConfig, mesh: Mesh) -> list[Weight]:
    tp, dim = mesh.tp, config.dim
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shared = config.kv_heads % tp != 0
    keys_here = keys if shared else keys // tp
    found = [Weight((queries // tp, dim)), Weight((dim, queries // tp))]
    found += [Weight((keys_here, dim), replicated=shared)] * 2
    if config.qkv_bias:
        found += [Weight((queries // tp,))] + [Weight((keys_here,), replicated=shared)] * 2
    if config.output_bias:
        found.append(Weight((dim,), replicated=True))
    if config.qk_norm_wide:
        found += [Weight((queries // tp,)), Weight((keys_here,), replicated=shared)]
    elif config.qk_norm:
        found += [Weight((config.head_dim,), replicated=True)] * 2
    if config.sinks:
        found.append(Weight((config.heads // tp,)))
    return found


def _latent_weights(config: DecoderConfig, mesh: Mesh) -> list[Weight]:
    latent, dim, heads = config.latent, config.dim, config.heads // mesh.tp
    assert latent is not None
    queries = heads * latent.head_dim
    down = latent.kv_rank + latent.rope_dim
    found = [Weight((down, dim), replicated=True), Weight((latent.kv_rank,), replicated=True)]
    found += [Weight((heads * (latent.nope_dim + latent.value_dim), latent.kv_rank))]
    found += [Weight((dim, heads * latent.value_dim))]
    if latent.q_rank:
        found += [Weight((latent.q_rank, dim), replicated=True), Weight((latent.q_rank,), replicated=True)]
        found += [Weight((queries, latent.q_rank))]
    else:
        found += [Weight((queries, dim))]
    if config.qkv_bias:
        found += [Weight((down,), replicated=True)]
        found += [Weight((latent.q_rank,), replicated=True)] if latent.q_rank else []
    return found + ([Weight((dim,), replicated=True)] if config.output_bias else [])


def _swiglu_weights(dim: int, ffn: int, bias: bool, tp: int) -> list[Weight]:
    whole = tp == 1
    found = [Weight((ffn // tp, dim), replicated=whole)] * 2 + [Weight((dim, ffn // tp), replicated=whole)]
    return found + ([Weight((ffn // tp,), replicated=whole)] * 2 + [Weight((dim,), replicated=True)] if bias else [])


def _expert_layer_weights(config: DecoderConfig, mesh: Mesh) -> list[Weight]:
    moe, dim = config.moe, config.dim
    assert moe is not None
    found = [Weight((moe.experts, dim), replicated=True)]
    if moe.router_bias:
        found.append(Weight((moe.experts,), replicated=True))
    if moe.shared_ffn:
        found += _swiglu_weights(dim, moe.shared_ffn, config.mlp_bias, 1)
    if moe.shared_gate:
        found.append(Weight((1, dim), replicated=True))
    experts, ffn = moe.experts // mesh.ep, moe.ffn // mesh.etp
    inner = [2 * ffn] if moe.fused else [ffn, ffn]
    found += [Weight((experts, width, dim), expert=True) for width in inner]
    found.append(Weight((experts, dim, ffn), expert=True))
    if moe.expert_bias:
        found += [Weight((experts, width), expert=True) for width in inner]
        found.append(Weight((experts, dim // mesh.etp), expert=True))
    return found


def outer_weights(config: DecoderConfig, mesh: Mesh, stage: Stage) -> list[Weight]:
    """Of a stage, outside of its blocks: embedding, last norm, head."""
    matrix = Weight((rows(config.vocab_size, mesh.tp), config.dim))
    found = [matrix] if stage.first or (stage.last and config.tied) else []
    if stage.last:
        found.append(Weight((config.dim,), replicated=True))
        found += [] if config.tied else [matrix]
    return found


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together, or a rank's own that never are."""

    weights: tuple[Weight, ...]
    ranks: int = 1
    """that cut them"""
    sharded: bool = False
    """by `fully_shard`, over however few ranks; else they are plain"""
    keeps: bool = False
    """they stay gathered after the forward pass"""
    all_reduced: bool = False
    """gradients are also summed over copies"""

    @cached_property
    def elements(self) -> int:
        """Of all of them, before data ranks cut them."""
        return sum(weight.elements for weight in self.weights)

    @cached_property
    def shard(self) -> int:
        """Elements that this rank holds of them."""
        return sum(self.shard_of(weight) for weight in self.weights)

    @cached_property
    def padded(self) -> int:
        """Elements of all ranks' shards together: of what is exchanged."""
        return self.ranks * self.shard

    @cached_property
    def across(self) -> int:
        """Elements of the weights that are not cut along their first dimension: copied once more on their way."""
        return sum(w.elements for w in self.weights if self.cut_dimension(w))

    def shard_of(self, weight: Weight) -> int:
        """Elements of one weight."""
        dim = self.cut_dimension(weight)
        return weight.elements // weight.shape[dim] * rows(weight.shape[dim], self.ranks) if weight.elements else 0

    def cut_dimension(self, weight: Weight) -> int:
        """Experts that are a unit of their own are cut where their ranks divide them; all others along the first."""
        if not self.sharded or not all(each.expert for each in self.weights):
            return 0
        fitting = (dim for dim in (1, 2, 0) if dim < len(weight.shape) and weight.shape[dim] % self.ranks == 0)
        return next(fitting, 0)


@dataclass(frozen=True)
class Units:
    """The parameters of a stage as data parallelism takes them (`parallel.data.shard_data`)."""

    root: Unit
    """what no other unit has"""
    blocks: dict[int, Unit]
    """first layer -> the unit of the blocks that begins there; empty: all are in the root"""
    experts: dict[int, Unit]
    """layer -> its experts, where they are a unit of their own, or plain ones; else they are with their block"""
    first: bool
    """they are those of the stage with the embedding"""
    last: bool
    """of that with the head"""

    @property
    def all(self) -> Iterable[Unit]:
        return (self.root, *self.blocks.values(), *self.experts.values())

    @property
    def elements(self) -> int:
        """That this rank holds."""
        return sum(unit.shard for unit in self.all)


def stage_units(config: DecoderConfig, mesh: Mesh, parallel: Parallel, stage: Stage, *, keeps: bool) -> Units:
    """The units of a stage.

    Args:
        keeps: parameters stay gathered between forward and backward whatever `parallel.data` is.
    """
    blocks = {layer: block_weights(config, mesh, layer) for layer in stage.layers}
    outer = outer_weights(config, mesh, stage)
    moe = config.moe is not None
    alone = moe and mesh.tp * mesh.ep > 1
    cast = parallel.precision != "none" or parallel.offload
    apart = alone and bool(set(stage.layers) & set(config.expert_layers))
    apart = apart and (mesh.dp_replicate * mesh.efsdp > 1 or cast)
    sharded = mesh.data_ranks * mesh.cp > 1 or cast or apart
    ddp = parallel.data == "ddp"
    keeps = keeps or parallel.data != "zero3"
    copies = mesh.dp_replicate > 1 or ddp
    common = {"sharded": sharded, "keeps": keeps, "all_reduced": copies}
    ranks = 1 if ddp or not sharded else mesh.dp_shard * mesh.cp
    experts: dict[int, Unit] = {}
    if alone:
        own = 1 if ddp or not apart else mesh.efsdp
        for layer, weights in blocks.items():
            mine = tuple(w for w in weights if w.expert)
            if mine:
                experts[layer] = Unit(mine, own, apart, keeps, copies)
                blocks[layer] = [w for w in weights if not w.expert]
    if not sharded or not parallel.unit:
        root = [*outer, *(w for weights in blocks.values() for w in weights)]
        return Units(Unit(tuple(root), ranks, **common), {}, experts, stage.first, stage.last)
    units = {}
    layers = list(blocks)
    for start in range(0, len(layers), parallel.unit):
        chosen = layers[start : start + parallel.unit]
        units[chosen[0]] = Unit(tuple(w for layer in chosen for w in blocks[layer]), ranks, **common)
    root_unit = Unit(tuple(outer), ranks, sharded, True, copies)
    return Units(root_unit, units, experts, stage.first, stage.last)
