from unittest import mock

import pytest

from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.moe.config import MoEConfig
from composable.parallel.config import Parallel
from composable.parallel.split import Stage
from composable.plan.exchange import Exchange, Items
from composable.plan.layers import Sizes
from composable.plan.passes import StagePasses
from composable.plan.shards import stage_units
from composable.plan.stage import stage_tape
from composable.plan.tape import Ledger, Pass

MODEL = DecoderConfig(
    vocab_size=96, dim=32, layers=4, heads=4, kv_heads=2, head_dim=8, ffn=64, moe=MoEConfig(experts=4, top_k=2, ffn=16)
)
MESH = Mesh(dp_replicate=1, dp_shard=4, pp=2, ep=2)


def stage(parallel: Parallel, ledger: Ledger, *, keeps: bool = False):
    part = Stage(True, range(3), False)
    units = stage_units(MODEL, MESH, parallel, part, keeps=keeps)
    sizes = Sizes(MODEL, MESH, 2, 16, 2, False, True, parallel.context, 1.0)
    tape, order = stage_tape(sizes, parallel, part, units)
    return tape, Exchange(order, ledger, Items(4, 2, 4), gradients="gradients", copies=False, at_end=True)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("data", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("halves", [False, True])
def test_passes_that_are_added_up_hold_what_passes_that_are_played_do(data, recompute, halves):
    parallel = Parallel(data=data, recompute=recompute, precision="bfloat16")
    backward = ["I", "W"] if halves else ["B"]
    kinds = ["F", "F", *[kind for _ in range(6) for kind in ("F", *backward)], *backward, *backward]
    one, other = Ledger(), Ledger()
    tape, exchange = stage(parallel, one, keeps=halves)
    added = StagePasses(tape, exchange, one)
    tape, played = stage(parallel, other, keeps=halves)
    running: list[Pass] = []
    with mock.patch.object(Pass, "over", autospec=True, side_effect=Pass.over) as begun:
        for _ in range(2):
            for each in (exchange, played):
                each.micro_batch(last=True, sync=True, reshards=False)
            for kind in kinds:
                added.play(kind)
                if kind == "F":
                    played.begin_forward()
                    running.append(Pass(tape, other, played.border, played.weights))
                    running[-1].forward()
                    played.end_forward()
                elif kind == "W":
                    running.pop(0).weight_half()
                else:
                    played.begin_backward()
                    running[0].backward(halves=halves)
                    played.end_backward()
                    if not halves:
                        running.pop(0)
                assert (one.total, one.peak, one.at_peak) == (other.total, other.peak, other.at_peak)
            for each in (exchange, played):
                each.reshards = True
                each.reduce_all()
        assert begun.call_count < len(kinds)
    assert {part: size for part, size in one.now.items() if size} == {p: s for p, s in other.now.items() if s}
