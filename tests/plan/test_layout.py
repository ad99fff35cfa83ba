"""A layout as text, as options, and in a recipe."""

import dataclasses

import pytest

from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.parallel.config import Pipeline
from composable.plan.layout import Layout
from composable.recipe import Recipe, command_line

RECIPE = Recipe(name="small", model=DecoderConfig(vocab_size=512, dim=64, layers=8, heads=8, kv_heads=4, ffn=96))


def test_a_text_changes_what_it_names():
    own = Layout.of(RECIPE)
    assert Layout.parse("", RECIPE) == own
    found = Layout.parse(
        "tp=2, pp=4,data=zero1,micro_batch=2,recompute=full,schedule=Interleaved1F1B,virtual=3", RECIPE
    )
    assert found.mesh == Mesh(tp=2, pp=4)
    assert (found.data, found.micro_batch, found.recompute) == ("zero1", 2, "full")
    assert (found.schedule, found.virtual, found.offload) == ("Interleaved1F1B", 3, own.offload)
    assert Layout.parse("offload=yes", RECIPE) == dataclasses.replace(own, offload=True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tp", "'tp' of the layout: write name=value, the name one of dp_replicate, dp_shard, cp, tp"),
        ("xp=2", "'xp=2' of the layout: write name=value"),
        ("tp=two", "'tp=two' of the layout: 'two' is no whole number"),
        ("data=zero4", "'data=zero4' of the layout: write one of ddp, zero1, zero2, zero3"),
        ("schedule=GPipes", "write one of GPipe, 1F1B, Interleaved1F1B"),
        ("offload=maybe", "write offload=True or offload=False"),
    ],
)
def test_a_text_that_is_none_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        Layout.parse(text, RECIPE)


@pytest.mark.parametrize(
    "text",
    [
        "tp=2,pp=2,dp_shard=2,data=zero1,schedule=Interleaved1F1B",
        "dp_shard=8,data=zero3,recompute=full,micro_batch=2",
        "dp_replicate=8,dp_shard=1,data=ddp,recompute=every:2",
        "dp_shard=8,offload=True",
    ],
)
def test_its_options_give_a_recipe_the_same_layout(text):
    layout = Layout.parse(text, RECIPE)
    put = layout.put_into(RECIPE)
    assert Layout.of(put) == layout if layout.mesh.pp > 1 else Layout.of(put).mesh == layout.mesh
    told = command_line(RECIPE, layout.options(RECIPE))
    assert told.resolve(8)[0].options() == put.resolve(8)[0].options()
    assert not Layout.of(RECIPE).options(RECIPE)


def test_a_split_by_hand_stays_with_its_stages_only():
    recipe = dataclasses.replace(RECIPE, mesh=Mesh(pp=2), pipeline=Pipeline(split="E t*2 | t*2 H"))
    assert Layout.of(recipe).put_into(recipe).pipeline.split
    assert not Layout.parse("pp=4", recipe).put_into(recipe).pipeline.split
    assert not Layout.parse("pp=2,schedule=LoopedBFS", recipe).put_into(recipe).pipeline.split


def test_what_the_parts_refuse_is_refused():
    with pytest.raises(ValueError, match=r"parallel.recompute='half'"):
        Layout.parse("recompute=half", RECIPE).put_into(RECIPE)


def test_it_is_said_in_words():
    assert str(Layout.parse("tp=2,pp=4,schedule=Interleaved1F1B", RECIPE)).startswith("dp_shard -1, tp 2, pp 4, micro")
    assert "pp" not in str(Layout.parse("tp=2", RECIPE))
