"""Expert parallelism: who holds which experts, and which part of each (GShard, Lepikhin et al. 2020, arXiv:2006.16668).

Ranks of `ep` hold consecutive experts and exchange tokens; ranks of `etp` hold a part of each expert's hidden width and
see each other's tokens; over `efsdp` and `dp_replicate` parameters are sharded and copied like all others. A rank's
gradient of an expert has the tokens of all ranks that sent it some, so that sums over `efsdp` and `dp_replicate` make
it whole: no factor corrects anything.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from composable.checkpoint.shards import local_box
from composable.mesh import Mesh, MeshViews
from composable.moe.config import MoEConfig
from composable.moe.dispatch import ExpertRanks
from composable.moe.experts import Experts
from composable.moe.layer import Routed, Runtime
from composable.moe.router import Routing, count
from composable.parallel.collectives import gather_stacked, scatter_stacked, stack_ranks

PLACES = {  # of the stacked weights on (ep, etp): experts, and their hidden width
    "gate_proj": (Shard(0), Shard(1)),
    "up_proj": (Shard(0), Shard(1)),
    "gate_up_proj": (Shard(0), Shard(1)),
    "down_proj": (Shard(0), Shard(2)),
    "gate_bias": (Shard(0), Shard(1)),
    "up_bias": (Shard(0), Shard(1)),
    "gate_up_bias": (Shard(0), Shard(1)),
    "down_bias": (Shard(0), Shard(1)),  # of the output: added once, each rank its columns
}


def check_experts(config: MoEConfig | None, mesh: Mesh) -> None:
    """Refuse experts that the mesh cannot share; `mesh` must be resolved.

    Raises:
        ValueError: naming the rule and the nearest right value.
    """
    if config is None:
        if mesh.ep > 1 or mesh.etp > 1:
            raise ValueError(
                f"mesh.ep={mesh.ep}, mesh.etp={mesh.etp}: the model has no experts (model.moe); write mesh.ep=1 and "
                "mesh.etp=1"
            )
        return
    for name, degree, what, size in (
        ("ep", mesh.ep, "moe.experts", config.experts),
        ("etp", mesh.etp, "moe.ffn", config.ffn),
    ):
        if size % degree:
            near = min((n for n in range(1, size + 1) if size % n == 0), key=lambda n: abs(n - degree))
            raise ValueError(
                f"mesh.{name}={degree} with model.{what}={size}: each rank has as many, so {name} divides them; the "
                f"nearest is mesh.{name}={near}"
            )


def runtime_of(
    config: MoEConfig,
    mesh: Mesh,
    views: MeshViews,
    *,
    ranks_per_node: int,
    micro_batches: int,
    seed: int,
    record: Callable[[Routed], None],
) -> Runtime:
    """The groups that layers with experts talk in; collective over all ranks.

    Args:
        ranks_per_node: of consecutive ranks; for the dispatcher that crosses nodes once.
        micro_batches: of a step on one data rank.
    """
    ranks = None
    if mesh.ep > 1:
        groups = _node_groups(mesh, views, ranks_per_node) if config.dispatcher == "hierarchical" else (None, None)
        ranks = ExpertRanks(views.expert.get_group("ep"), *groups)
    batch = None
    if mesh.cp * mesh.tp > 1:
        if mesh.cp > 1 and mesh.tp > 1:
            device_type, shape = views.dense.device_type, (mesh.world // (mesh.cp * mesh.tp), mesh.cp * mesh.tp)
            batch = init_device_mesh(device_type, shape, mesh_dim_names=("others", "batch")).get_group("batch")
        else:
            batch = views.dense.get_group("cp" if mesh.cp > 1 else "tp")
    alone = mesh.pp == 1 and micro_batches == 1 and config.balance.counts_step
    side = torch.cuda.Stream() if views.dense.device_type == "cuda" and config.shared_ffn and ranks else None
    return Runtime(ranks, batch, dist.group.WORLD if alone else None, side, seed, record)


def _node_groups(
    mesh: Mesh, views: MeshViews, ranks_per_node: int
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Of the ranks that share experts: those of one node, and those of one place in every node."""
    inner = mesh.etp * mesh.ep  # consecutive ranks; ep varies slower than etp
    inside = max(1, min(mesh.ep, ranks_per_node // mesh.etp))
    if (inner > ranks_per_node and inner % ranks_per_node) or mesh.ep % inside:
        raise ValueError(
            f"model.moe.dispatcher=hierarchical with mesh.ep={mesh.ep} and {ranks_per_node} ranks a node: the experts' "
            "ranks fill whole nodes; choose an ep that is a multiple of a node's ranks, or dispatcher=all_to_all"
        )
    shape = (mesh.world // inner, mesh.ep // inside, inside, mesh.etp)
    names = ("others", "across", "inside", "etp")
    split = init_device_mesh(views.expert.device_type, shape, mesh_dim_names=names)
    return split.get_group("inside"), split.get_group("across")


def expert_parallel(experts: Experts, mesh: DeviceMesh) -> None:
    """Keep this rank's part of the experts, in place; before `fully_shard`.

    Args:
        experts: on the meta device or not, the same on every rank.
        mesh: two dimensions, named `ep` and `etp`.
    """
    wide = [name for name in ("ep", "etp") if mesh[name].size() > 1]
    if not wide:
        return
    for name, whole in list(experts.named_parameters(recurse=False)):
        placements = [dict(zip(("ep", "etp"), PLACES[name], strict=True))[dim] for dim in wide]
        shard = distribute_tensor(whole.detach(), mesh[tuple(wide)], placements, src_data_rank=None)
        setattr(experts, name, nn.Parameter(shard, requires_grad=whole.requires_grad))
    if "etp" in wide:
        if experts.bias:
            _check_columns(experts.down_bias.size(1), mesh["etp"].size())
            experts.first_column = local_box(experts.down_bias).offsets[1]
        forward = partial(_with_all_tokens, experts.forward, mesh.get_group("etp"))
        experts.forward = forward  # type: ignore[method-assign]


def _check_columns(width: int, etp: int) -> None:
    if width % etp:
        near = min((n for n in range(1, width + 1) if width % n == 0), key=lambda n: abs(n - etp))
        raise ValueError(
            f"mesh.etp={etp} with model.dim={width} and model.moe.expert_bias: each rank adds as many columns of the "
            f"bias, so etp divides dim; the nearest is mesh.etp={near}"
        )


@torch.compiler.disable
def _with_all_tokens(
    forward: Callable[..., Tensor],
    group: dist.ProcessGroup,
    x: Tensor,
    routing: Routing,
    ranks: ExpertRanks | None = None,
    batch_ranks: int = 1,
) -> Tensor:
    """Each rank computes its part of the hidden width for the tokens of all; the parts are added up.

    x [T, D] -> [T, D]. Weights take part in the gather, so that their gradient is the sum of the parts'.
    """
    ids = stack_ranks(routing.ids, group).flatten(0, 1)
    weights = gather_stacked(routing.weights, group).flatten(0, 1)
    everyone = Routing(ids, weights, count(ids, routing.counts.numel()))
    size = dist.get_world_size(group)
    out = forward(gather_stacked(x, group).flatten(0, 1), everyone, ranks, batch_ranks // size)
    return scatter_stacked(out.unflatten(0, (size, -1)), group)


def shard_dimension(parameter: nn.Parameter, ranks: int) -> Shard:
    """The dimension of stacks that data ranks cut: one that they divide, and if there is one, uncut so far.

    Of one that is not divided only the first can be cut.
    """
    local, taken = parameter, set[int]()
    if isinstance(parameter, DTensor):
        local = parameter.to_local()  # type: ignore[assignment]
        taken = {p.dim for p in parameter.placements if isinstance(p, Shard)}
    fitting = [dim for dim in (1, 2, 0) if dim < local.ndim and local.size(dim) % ranks == 0]
    return Shard(min(fitting, key=lambda dim: dim in taken, default=0))
