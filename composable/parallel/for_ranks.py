"""Which part of each weight the ranks of an inference engine hold: what `tensor.py` and `expert.py` cut, by name.

Layers go to the stages of `pp` in equal numbers (later stages have one more where they do not divide), the embedding to
the first, last norm and head to the last; a tied embedding is in both. Over `tp`: rows of q, k, v, gate and up (k and v
whole where their heads do not divide), columns of o and down, rows of embedding and head (a last shard may be short);
norms, routers, shared experts, what makes latents and the biases of o and down are whole on each. Of experts each rank
of `tp` holds consecutive ones by `ep`, which divides tp; the tp / ep ranks of the same experts cut their hidden width.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise

from composable.checkpoint.shards import Box, chunk, full_box
from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.parallel.expert import check_experts
from composable.parallel.tensor import check_tensor

EMBEDDING = "model.embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)", re.ASCII)
_EXPERT = re.compile(
    r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.((?:gate|up|gate_up|down)_proj\.(?:weight|bias)|w[123]\.weight)",
    re.ASCII,
)
_EXPERT_COLUMNS = {"down_proj.weight": 1, "w2.weight": 1, "down_proj.bias": None}  # where the width is not the rows
_STACKS = {  # of all experts -> the dimension of their width
    "mlp.experts.gate_up_proj": 2,
    "mlp.experts.gate_up_proj_bias": 1,
    "mlp.experts.down_proj": 1,
    "mlp.experts.down_proj_bias": None,
}
_ROWS = re.compile(r"self_attn\.((q_proj|q_b_proj|kv_b_proj)\.(weight|bias)|sinks)|mlp\.(gate|up)_proj\.(weight|bias)")
_KEYS = re.compile(r"self_attn\.[kv]_proj\.(weight|bias)")
_NORM = re.compile(r"self_attn\.([qk])_norm\.weight")
_COLUMNS = re.compile(r"self_attn\.o_proj\.weight|mlp\.down_proj\.weight")
_WHOLE = re.compile(
    r"(self_attn\.o_proj|mlp\.down_proj)\.bias"
    r"|\w+_layernorm\.weight|self_attn\.[qk]_norm\.weight|self_attn\.rotary_emb\.inv_freq"
    r"|self_attn\.(q_a_proj|kv_a_proj_with_mqa)\.(weight|bias)|self_attn\.(q_a|kv_a)_layernorm\.weight"
    r"|(mlp|block_sparse_moe)\.(gate|router)\.(weight|bias|e_score_correction_bias)"
    r"|mlp\.shared_expert(s|_gate)?\..+"
)


@dataclass(frozen=True)
class Layout:
    """Degrees of an inference engine's parallelism."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    """of the tensor ranks, those that hold different experts: 1 to tp"""

    @staticmethod
    def parse(text: str) -> "Layout":
        """Read `tp=8,pp=2`; ValueError for what is no such text."""
        known = [field.name for field in fields(Layout)]
        degrees: dict[str, int] = {}
        for word in text.split(","):
            name, _, value = word.strip().partition("=")
            if name not in known or name in degrees or not re.fullmatch(r"[1-9]\d{0,5}", value, re.ASCII):
                raise ValueError(
                    f"layout {text!r}, {word.strip()!r}: write degrees of {', '.join(known)}, each once and 1 or more, "
                    "as tp=8,pp=2"
                )
            degrees[name] = int(value)
        return Layout(**degrees)

    def stages(self, layers: int) -> list[range]:
        """The layers of each stage of `pp`."""
        bounds = [layers * stage // self.pp for stage in range(self.pp + 1)]
        return [range(*pair) for pair in pairwise(bounds)]


def held_boxes(
    config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]], layout: Layout
) -> dict[str, dict[str, Box]]:
    """What each rank holds: its name, `pp0-tp3`, -> name of a weight in a checkpoint -> the box that it holds.

    Args:
        shapes: of all weights, under their names in a checkpoint of the model.

    Raises:
        ValueError: degrees that do not fit the model, with the nearest that do; names that are no weights of it.
    """
    _check(config, layout)
    stages = layout.stages(config.layers)
    held: dict[str, dict[str, Box]] = {
        f"pp{stage}-tp{rank}": {} for stage in range(layout.pp) for rank in range(layout.tp)
    }
    unknown = []
    for name, shape in shapes.items():
        where = _stages_with(name, stages, tied=config.tied and "lm_head.weight" not in shapes)
        try:
            boxes = list(_boxes(name, shape, config, layout))
        except LookupError:
            where = []
        if not where:
            unknown.append(name)
            continue
        for stage in where:
            for rank, box in boxes:
                held[f"pp{stage}-tp{rank}"][name] = box
    if unknown:
        names = ", ".join(sorted(unknown)[:5]) + (", ..." if len(unknown) > 5 else "")
        raise ValueError(f"{len(unknown)} tensors are no weights of the model that config.json tells of: {names}")
    return held


def _check(config: DecoderConfig, layout: Layout) -> None:
    if layout.pp > config.layers:
        raise ValueError(f"pp={layout.pp} with {config.layers} layers: each stage has one; write pp={config.layers}")
    if layout.tp % layout.ep:
        near = max(n for n in range(1, layout.ep + 1) if layout.tp % n == 0)
        raise ValueError(
            f"ep={layout.ep} with tp={layout.tp}: experts are spread over the tensor ranks, so ep divides tp; the "
            f"nearest is ep={near}"
        )
    check_tensor(config, layout.tp, layout.tp)
    etp = layout.tp // layout.ep if config.moe else 1
    check_experts(config.moe, Mesh(tp=layout.tp, ep=layout.ep, etp=etp))


def _stages_with(name: str, stages: list[range], *, tied: bool) -> list[int]:
    """The stages that need a tensor; none if it is no model's."""
    if match := _LAYER.fullmatch(name):
        return [stage for stage, layers in enumerate(stages) if int(match[1]) in layers]
    last = len(stages) - 1
    table = {EMBEDDING: sorted({0, last}) if tied else [0], "model.norm.weight": [last], "lm_head.weight": [last]}
    return table.get(name, [])


def _boxes(name: str, shape: tuple[int, ...], config: DecoderConfig, layout: Layout) -> Iterator[tuple[int, Box]]:
    """(rank of `tp`, box) of each rank that holds some of a tensor; LookupError for a name that no model has."""
    match = _LAYER.fullmatch(name)
    if match and (expert := _EXPERT.fullmatch(match[2])) and config.moe is not None:
        group, etp = config.moe.experts // layout.ep, layout.tp // layout.ep
        dim = _EXPERT_COLUMNS.get(expert[2], 0)
        for part in range(etp):
            yield int(expert[1]) // group * etp + part, _cut(full_box(shape), dim, etp, part)
        return
    if match and match[2] in _STACKS and config.moe is not None:
        etp = layout.tp // layout.ep
        for rank in range(layout.tp):
            experts = _cut(full_box(shape), 0, layout.ep, rank // etp)
            yield rank, _cut(experts, _STACKS[match[2]], etp, rank % etp)
        return
    dim_or_none = _cut_dim(match[2], config, layout) if match else None if name == "model.norm.weight" else 0
    for rank in range(layout.tp):
        yield rank, _cut(full_box(shape), dim_or_none, layout.tp, rank)


def _cut_dim(name: str, config: DecoderConfig, layout: Layout) -> int | None:
    """The dimension along which a layer's weight is cut over `tp`."""
    if config.qk_norm_wide and (norm := _NORM.fullmatch(name)):  # as what it norms
        name = f"self_attn.{norm[1]}_proj.weight"
    if _ROWS.fullmatch(name):
        return 0
    if _KEYS.fullmatch(name):
        return None if config.kv_heads % layout.tp else 0
    if _COLUMNS.fullmatch(name):
        return 1
    if _WHOLE.fullmatch(name):
        return None
    raise LookupError(name)


def _cut(box: Box, dim: int | None, parts: int, part: int) -> Box:
    return box if dim is None else box.narrow(dim, *chunk(box.sizes[dim], parts, part))
