import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from composable.optim.clip import clip_by_global_norm, clip_coefficient, scale_gradients, squared_norm

# A two-layer Llama of width 64: 106816 elements.
LAYER = [(64,), (64, 64), (32, 64), (32, 64), (64, 64), (64,), (128, 64), (128, 64), (64, 128)]
DENSE = [(256, 64), *LAYER, *LAYER, (64,), (256, 64)]
N = 106816


def parameters_of_ones(shapes, dtype=torch.float32):
    made = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def distributed(value, mesh, placements):
    parameter = nn.Parameter(distribute_tensor(value, mesh, placements))
    parameter.grad = distribute_tensor(value, mesh, placements)
    return parameter


def test_gradients_of_ones_have_the_norm_sqrt_n_and_are_clipped_to_its_inverse():
    parameters = parameters_of_ones(DENSE)
    assert sum(p.numel() for p in parameters) == N
    norm = clip_by_global_norm(parameters, 1.0)
    assert norm.dtype == torch.float64
    assert norm.item() == pytest.approx(math.sqrt(N), rel=1e-7)
    for parameter in parameters:
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 1 / math.sqrt(N)), rtol=1e-7, atol=0)


def test_float64_gradients_give_a_float64_norm():
    parameters = [nn.Parameter(torch.zeros(1000, dtype=torch.float64)) for _ in range(3)]
    for i, parameter in enumerate(parameters):
        parameter.grad = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
    exact = torch.cat([p.grad for p in parameters]).norm().item()
    assert clip_by_global_norm(parameters, 0).item() == pytest.approx(exact, rel=1e-14)


def test_the_norm_of_a_long_float32_gradient_keeps_six_digits():
    (parameter,) = parameters_of_ones([(3_000_001,)])
    parameter.grad = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    exact = parameter.grad.double().norm().item()
    assert clip_by_global_norm([parameter], 0).item() == pytest.approx(exact, rel=1e-6)


def test_bfloat16_gradients_are_summed_in_float32():
    parameters = parameters_of_ones([(1003,), (5,)], torch.bfloat16)
    assert clip_by_global_norm(parameters, 0).item() == pytest.approx(math.sqrt(1008), rel=1e-6)


def test_frozen_and_missing_gradients_do_not_count_and_are_not_scaled():
    parameters = parameters_of_ones([(9,), (16,), (4,)])
    parameters[1].requires_grad_(False)
    parameters[2].grad = None
    assert clip_by_global_norm(parameters, 1.0).item() == 3.0
    assert parameters[0].grad.tolist() == pytest.approx([1 / 3] * 9)
    assert parameters[1].grad.tolist() == [1.0] * 16
    assert parameters[2].grad is None


def test_a_parameter_given_twice_counts_once():
    parameters = parameters_of_ones([(4,)])
    assert clip_by_global_norm(parameters * 2, 1.0).item() == 2.0
    assert parameters[0].grad.tolist() == [0.5] * 4


def test_nothing_to_clip_has_the_norm_zero():
    assert squared_norm([], 4).item() == 0.0
    assert clip_by_global_norm([nn.Parameter(torch.ones(3))], 1.0).item() == 0.0


def test_the_coefficient_is_exact_and_never_above_one():
    def coefficient(norm, max_norm):
        return clip_coefficient(torch.tensor(norm, dtype=torch.float64), max_norm).item()

    assert coefficient(4.0, 1.0) == 0.25
    assert coefficient(0.5, 1.0) == 1.0
    assert coefficient(0.0, 1.0) == 1.0
    assert coefficient(4.0, 0.0) == 1.0
    assert math.isnan(coefficient(math.nan, 1.0))
    with pytest.raises(ValueError, match="not negative"):
        coefficient(1.0, -1.0)


def test_max_norm_zero_leaves_the_gradients_bit_for_bit():
    (parameter,) = parameters_of_ones([(7,)])
    parameter.grad.mul_(1e30)
    before = parameter.grad.clone()
    clip_by_global_norm([parameter], 0)
    assert torch.equal(parameter.grad, before)


def _layouts(sizes):
    """Mixes of plain, replicated, sharded (also unevenly) gradients on one mesh: the norm, how many, their values."""
    mesh = init_device_mesh("cpu", sizes)
    kinds = {
        (2,): [[Replicate()], [Shard(0)], None],
        (2, 2): [
            [Replicate(), Shard(0)],
            [Shard(0), Replicate()],
            [Shard(0), Shard(0)],
            [Replicate()] * 2,
            None,
        ],
    }[sizes]
    parameters = []
    for i, shape in enumerate([*DENSE, (7, 3), (1, 5), (3,)]):  # the last three do not divide
        placements = kinds[i % len(kinds)]
        ones = torch.ones(shape)
        parameters += parameters_of_ones([shape]) if placements is None else [distributed(ones, mesh, placements)]
    wide = distributed(torch.ones(4, 6), mesh, [Shard(1)] * len(sizes))
    frozen = distributed(torch.ones(64), mesh, [Shard(0)] * len(sizes))
    frozen.requires_grad_(False)
    bare = nn.Parameter(distribute_tensor(torch.ones(64), mesh, [Shard(0)] * len(sizes)))
    norm = clip_by_global_norm([*parameters, wide, frozen, bare], 1.0)
    full = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in [*parameters, wide]]
    return norm.item(), sum(g.numel() for g in full), {round(v.item(), 10) for g in full for v in g.unique()}


@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_the_norm_is_sqrt_n_for_every_mix_of_placements(ranks, sizes):
    count = N + 21 + 5 + 3 + 24
    for norm, seen, values in ranks(math.prod(sizes), _layouts, sizes):
        assert seen == count
        assert norm == pytest.approx(math.sqrt(count), rel=1e-7)
        assert all(value == pytest.approx(1 / math.sqrt(count), rel=1e-6) for value in values)


def _stages(stages, chunks):
    """Four layers, embedding and head over stages of `world / stages` ranks, each sharded within its stage."""
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (stages, world // stages), mesh_dim_names=("pp", "dp"))
    stage = mesh["pp"].get_local_rank()
    parts = [[(256, 64), *LAYER], LAYER, LAYER, [*LAYER, (64,), (256, 64)]]
    mine = [shapes for i, shapes in enumerate(parts) if (i * stages * chunks // 4) % stages == stage]
    parameters = [
        distributed(torch.ones(shape), mesh["dp"], [Shard(0)]) if world > stages else parameters_of_ones([shape])[0]
        for shapes in mine
        for shape in shapes
    ]
    norm = clip_by_global_norm(parameters, 1.0, ranks_per_stage=world // stages)
    gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
    return norm.item(), min(g.min().item() for g in gradients), max(g.max().item() for g in gradients)


@pytest.mark.parametrize(("world", "stages", "chunks"), [(2, 2, 1), (4, 4, 1), (2, 2, 2), (4, 2, 1)])
def test_every_stage_of_a_pipeline_has_the_norm_of_the_whole_model(ranks, world, stages, chunks):
    for norm, low, high in ranks(world, _stages, stages, chunks):
        assert norm == pytest.approx(425.2058, abs=5e-5)
        assert norm == pytest.approx(math.sqrt(180800), rel=1e-7)
        assert low == high == pytest.approx(0.00235180, abs=5e-9)


def _fsdp_over_tensor_parallel():
    """FSDP2 over a weight that tensor parallelism sharded in the same dimension, beside a plain layer."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.LayerNorm(8)).double()
    full = torch.randn(8, 6, dtype=torch.float64)
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh["tp"], [Shard(0)]))
    fully_shard(model[0], mesh=mesh["dp"])
    weight = model[0].weight
    weight.grad = DTensor.from_local(
        torch.empty_like(weight.to_local()), mesh, weight.placements, shape=weight.shape, stride=weight.stride()
    )
    # Rows 4t..4t+3 are tensor rank t's, and each data rank has half of them: rank (d, t) holds rows 4t+2d, 4t+2d+1.
    row = 4 * mesh["tp"].get_local_rank() + 2 * mesh["dp"].get_local_rank()
    weight.grad.to_local().copy_(full[row : row + 2])
    for parameter in model[1].parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    norm = clip_by_global_norm(model.parameters(), 1.0)
    return norm.item(), (full.square().sum() + 2 * 8 * 4).sqrt().item(), [type(p).__name__ for p in weight.placements]


def test_strided_shards_count_once_beside_plain_gradients(ranks):
    for norm, exact, placements in ranks(4, _fsdp_over_tensor_parallel):
        assert "_StridedShard" in placements
        assert norm == pytest.approx(exact, rel=1e-14)


def _two_meshes():
    """Experts on one view of the ranks, dense weights on another."""
    dense = init_device_mesh("cpu", (4,))
    expert = init_device_mesh("cpu", (2, 2))
    parameters = [
        distributed(torch.ones(8, 3), dense, [Shard(0)]),
        distributed(torch.ones(4, 6), expert, [Shard(1), Shard(0)]),
        distributed(torch.ones(4, 6), expert, [Replicate(), Shard(0)]),
    ]
    return clip_by_global_norm(parameters, 0.0).item()


def test_gradients_on_two_meshes_make_one_norm(ranks):
    assert ranks(4, _two_meshes) == [pytest.approx(math.sqrt(72), rel=1e-7)] * 4


def _refusals():
    mesh = init_device_mesh("cpu", (2,))
    partial = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    partial.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    with pytest.raises(ValueError, match="redistribute"):
        squared_norm([partial], 2)
    with pytest.raises(ValueError, match="redistribute"):
        scale_gradients([partial], 0.5)
    with pytest.raises(ValueError, match="world size / pipeline degree"):
        squared_norm([distributed(torch.ones(4), mesh, [Shard(0)])], 1)


def test_partial_gradients_and_impossible_counts_are_refused(ranks):
    ranks(2, _refusals)
