"""State dicts as people nest them become weights and state of the optimizer under our names."""

import pytest
import torch

from composable.checkpoint.formats import dcp, torch_file
from composable.checkpoint.formats.source import write
from composable.checkpoint.shards import full_box


def values(entry):
    """The whole tensor, of an entry that is read as one."""
    (unit,) = entry.units(1 << 20)
    ((box, data),) = entry.values(unit, 1 << 20)
    assert box == full_box(entry.spec.shape)
    return data


def opened(tmp_path, content):
    torch.save(content, tmp_path / "x.pt")
    return torch_file.source(tmp_path / "x.pt")


def trained():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("keys", [("model", "optimizer"), ("state_dict", "optimizer_state_dict")])
def test_an_optimizers_numbers_become_the_names_of_weights(tmp_path, keys, wrapped):
    model, optimizer = trained()
    content = {keys[0]: model.state_dict(), keys[1]: optimizer.state_dict(), "epoch": 3, "rng": torch.arange(4)}
    found = opened(tmp_path, {"checkpoint": content} if wrapped else content)
    assert {n: values(e).tolist() for n, e in found.sections["weights"].items()} == {
        name: tensor.tolist() for name, tensor in model.state_dict().items()
    }
    for name, weight in model.named_parameters():
        for state, tensor in optimizer.state[weight].items():
            assert torch.equal(values(found.sections["optimizer"][f"{name}.{state}"]), tensor)
    assert found.notes == ("left out: epoch, rng, optimizer.param_groups",)


def test_numbers_that_are_not_those_of_the_weights_are_refused(tmp_path):
    model, optimizer = trained()
    state = optimizer.state_dict()
    swapped = {**state["state"], 0: state["state"][1], 1: state["state"][0]}
    for other, text in (
        ({**state, "state": swapped}, "has the shape"),
        ({**state, "state": {0: state["state"][0]}}, "for 4 weights"),
        ({**state, "param_groups": state["param_groups"] * 2}, "in 2 groups"),
    ):
        with pytest.raises(ValueError, match=text):
            opened(tmp_path, {"model": model.state_dict(), "optimizer": other})


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_a_flat_dictionary_is_weights_without_what_wrappers_put_before_names(tmp_path, prefix):
    content = {f"{prefix}model.norm.weight": torch.ones(3), f"{prefix}lm_head.weight": torch.zeros(2)}
    states = {"state": {f"{prefix}model.norm.weight": {"m": torch.ones(3)}}, "lr": 0.1}
    parted = opened(tmp_path, {"model": content, "optimizer": states})
    assert list(parted.sections["optimizer"]) == ["model.norm.weight.m"]
    assert parted.notes == ("left out: optimizer.lr",)
    found = opened(tmp_path, content)
    assert list(found.sections["weights"]) == ["model.norm.weight", "lm_head.weight"]
    write(torch_file.target(found), tmp_path / "b", 8)
    again = torch.load(tmp_path / "b" / "model.pt", weights_only=True)
    assert {name: tensor.tolist() for name, tensor in again.items()} == {
        "model.norm.weight": [1, 1, 1],
        "lm_head.weight": [0, 0],
    }


def test_numbers_of_an_optimizer_are_scalars(tmp_path):
    found = opened(tmp_path, {"model": {"w": torch.ones(2)}, "optim": {"state": {"w": {"step": 7, "on": "cpu"}}}})
    assert torch.equal(values(found.sections["optimizer"]["w.step"]), torch.tensor(7.0))
    assert found.notes == ("left out: optimizer.w.on",)
    write(dcp.target(found), tmp_path / "d", 8)
    assert torch.equal(values(dcp.source(tmp_path / "d").sections["optimizer"]["w.step"]), torch.tensor(7.0))


def test_a_name_that_stands_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a\.b stands twice"):
        opened(tmp_path, {"model": {"a.b": torch.ones(2), "a": {"b": torch.ones(2)}}})
