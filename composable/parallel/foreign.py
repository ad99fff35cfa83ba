"""A model of another library in composition, by the names of its modules and a plan of torch's own tensor styles.

The model is built whole, without memory for its parameters, and the modules that a stage does not have are taken out:
layers go, so that the others keep their global names, and what stands before or after them passes its input on. Thus
the model's own forward runs in every stage.
"""

import contextlib
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.modules.module import register_module_parameter_registration_hook

from composable.models.attention import LOCAL, Method
from composable.models.init import Init, InitRule
from composable.models.loss import cross_entropy_sum
from composable.moe.layer import ALONE, Runtime
from composable.parallel.architecture import Architecture
from composable.parallel.split import Costs, Stage

Call = Callable[[Callable[..., object], Tensor, Tensor, Tensor | None], Tensor]
"""(the model's own forward, x, positions [B or 1, S], documents [B, S] or None) -> logits [B, S, V]. In a stage that is
not the first x are hidden states [B, S, D] instead of tokens [B, S], which what stands before the blocks passes on; in
one that is not the last the result is hidden states"""


def foreign_architecture(
    build_model: Callable[[], nn.Module],
    call: Call,
    *,
    blocks: str,
    first: Sequence[str],
    last: Sequence[str],
    plan: Mapping[str, ParallelStyle],
    width: int,
    dtype: torch.dtype,
    std: float = 0.02,
) -> Architecture:
    """A model that is not ours, as `compose` takes it.

    The tensor plan is one without sequence parallelism: hidden states between blocks are whole and equal on all tensor
    ranks, and so are the gradients of what the plan leaves out. The logits are to be whole too.
    Compiled blocks cannot be recomputed too under such a plan: torch 2.13 fails in their forward pass.

    Args:
        build_model: makes the whole model, the same each time. Parameters cost nothing; buffers are computed.
        call: how the model is called.
        blocks: name of the list that holds the blocks.
        first: names of the modules with parameters before the blocks; each takes x alone and gives hidden states.
        last: of those after them, likewise.
        plan: name pattern of modules -> style, as `parallelize_module` takes it.
        width: D of the hidden states.
        dtype: of the parameters; buffers stay as they are built.
        std: of initial matrices; weights of one dimension (norms) start at one, biases at zero.

    Raises:
        ValueError: a name that the model lacks, a parameter in none of the parts, or tied weights.
    """
    whole = _build(build_model, dtype)
    _check(whole, blocks, first, last)

    def build(stage: Stage, method: Method, runtime: Runtime = ALONE) -> nn.Module:
        if method is not LOCAL:
            raise ValueError("mesh.cp: the attention of a model that is not ours sees one rank's tokens; write 1")
        part = _build(build_model, dtype)
        layers = part.get_submodule(blocks)
        for index, name in enumerate([name for name, _ in layers.named_children()]):
            if index not in stage.layers:
                delattr(layers, name)
        for name in [*([] if stage.first else first), *([] if stage.last else last)]:
            part.set_submodule(name, nn.Identity())
        part.forward = partial(_forward, partial(call, part.forward), stage.last)
        return part

    return Architecture(
        build,
        lambda part: list(part.get_submodule(blocks).children()),
        partial(_tensor, plan),
        partial(_costs, whole, blocks, first, last, width),
        _init(whole, std),
        width,
        sequence_cut=False,
        partial_over_tensor=lambda part: [],
    )


def _forward(
    call: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    last: bool,
    x: Tensor,
    labels: Tensor | None = None,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """As `Decoder.forward`: logits, or the summed loss if there are labels, or a stage's hidden states."""
    if positions is None:
        positions = torch.arange(x.size(1), device=x.device)
    out = call(x, positions if positions.ndim == 2 else positions[None], documents)
    if not last:
        return out.clone()  # split-backward schedules detach it in place, which a view refuses
    return out if labels is None else cross_entropy_sum(out, labels)


def _build(build_model: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    with torch.device("cpu"), _parameters_on_meta(dtype):
        return build_model()


@contextlib.contextmanager
def _parameters_on_meta(dtype: torch.dtype) -> Iterator[None]:
    """Parameters lose their memory as a module takes them, before it is touched; buffers have theirs, and values."""

    def hook(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:  # one that two modules share stays one
            return None
        return nn.Parameter(parameter.detach().to("meta", dtype), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(hook)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _check(model: nn.Module, blocks: str, first: Sequence[str], last: Sequence[str]) -> None:
    known = {name for name, _ in model.named_modules()}
    for name in (blocks, *first, *last):
        if name not in known:
            raise ValueError(f"the model has no module {name!r}; print(model) shows their names")
    parts = tuple(f"{name}." for name in (blocks, *first, *last))
    owner: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not name.startswith(parts):
            raise ValueError(
                f"parameter {name} is in none of the parts {', '.join(parts)}, so no stage would know whether it has "
                "it; name its module in `first` or `last`"
            )
        if parameter in owner:
            raise ValueError(
                f"{name} and {owner[parameter]} are one tied weight, which would come apart between stages and shards; "
                "build the model with untied weights (tie_word_embeddings=False)"
            )
        owner[parameter] = name


def _tensor(plan: Mapping[str, ParallelStyle], part: nn.Module, mesh: DeviceMesh) -> None:
    """The entries of the plan for which the part has a module: torch warns of the others."""
    names = [name for name, module in part.named_modules() if not isinstance(module, nn.Identity)]
    here = {pattern: style for pattern, style in plan.items() if fnmatch.filter(names, pattern)}
    parallelize_module(part, mesh, here)


def _costs(model: nn.Module, blocks: str, first: Sequence[str], last: Sequence[str], width: int, seq_len: int) -> Costs:
    """6 FLOPs a token for each element of a matrix, and attention as `split.costs` has it, with heads as wide as D."""

    def matrices(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim > 1)

    each = [6 * matrices(block) + 12 * width * seq_len for block in model.get_submodule(blocks).children()]
    head = sum(6 * matrices(model.get_submodule(name)) for name in last)
    return Costs(2 * width * len(first), tuple(each), head)


def _init(model: nn.Module, std: float) -> InitRule:
    matrix = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}

    def rule(name: str) -> Init:
        if name in matrix:
            return Init(std=std)
        return Init(mean=0.0 if name.endswith("bias") else 1.0)

    return rule
