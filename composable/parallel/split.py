"""How a model is cut into pipeline stages: by cost, or by hand."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from composable.models.config import DecoderConfig
from composable.models.count import attention_flops, block_matrices

V_SCHEDULES = frozenset({"ZBVZeroBubble", "DualPipeV"})
"""schedules that go down the ranks and up again, so that rank 0 holds the first stage and the last"""


@dataclass(frozen=True)
class Stage:
    """The parts of a decoder that one stage holds."""

    first: bool
    """with the embedding"""
    layers: range
    """global indices of its blocks"""
    last: bool
    """with the last norm, the head and the loss"""

    def __str__(self) -> str:
        blocks = {0: [], 1: ["t"]}.get(len(self.layers), [f"t*{len(self.layers)}"])
        return " ".join(["E"] * self.first + blocks + ["H"] * self.last)


@dataclass(frozen=True)
class Costs:
    """Floating-point operations of the parts of a decoder, forward and backward, per token."""

    embedding: int
    blocks: tuple[int, ...]
    head: int
    """the head and the loss"""

    def of(self, stage: Stage) -> int:
        """Of one stage."""
        blocks = sum(self.blocks[index] for index in stage.layers)
        return self.embedding * stage.first + blocks + self.head * stage.last


def costs(config: DecoderConfig, seq_len: int) -> Costs:
    """Training FLOPs of the parts, counted as `count.flops_per_token` counts the whole.

    What that leaves out as small is added here, so that no part is free: 2 operations an element of the embedding's
    row (the copy and its gradient's sum), and 6 a logit for the loss (maximum, difference, exponential, sum, and their
    gradient).

    Args:
        seq_len: tokens that a token attends to, as if attention were not causal.
    """
    blocks = tuple(
        6 * block_matrices(config, layer) + attention_flops(config, seq_len, layer) for layer in range(config.layers)
    )
    head = 6 * config.vocab_size * config.dim + 6 * config.vocab_size
    return Costs(2 * config.dim, blocks, head)


def owners(schedule: str, pp: int, stages: int) -> tuple[int, ...]:
    """The rank of the pipeline that holds each stage [stages].

    In a loop, stage s on rank s % pp; in a V schedule, rank r holds stages r and 2 * pp - 1 - r.
    """
    if schedule in V_SCHEDULES:
        return tuple(min(stage, 2 * pp - 1 - stage) for stage in range(stages))
    return tuple(stage % pp for stage in range(stages))


def split_by_cost(costs: Costs, stages: int, owners: Sequence[int] | None = None) -> list[Stage]:
    """Cut the model so that the slowest stage is as fast as can be, exactly; each stage gets at least one block.

    Of the cuts that reach this, with one stage a rank: the most even one (the least sum of squares), then the one with
    the fewest blocks in early stages, which keep the most micro-batches in flight.

    With several stages a rank, throughput is that of the slowest rank. Where all blocks cost the same, the slowest
    rank is as fast as can be among the cuts with the fastest slowest stage, exactly too: only numbers of blocks count
    then, so blocks go one by one to the rank with the least to do. Where blocks differ, the even cut is taken: its
    slowest rank costs at most as many times the slowest stage as it has stages.

    Args:
        owners: the rank of each stage [stages]; one stage a rank if None.

    Raises:
        ValueError: more stages than blocks.
    """
    if not 1 <= stages <= len(costs.blocks):
        raise ValueError(
            f"{stages} pipeline stages for {len(costs.blocks)} blocks: each stage needs at least one; "
            f"use at most {len(costs.blocks)} stages (mesh.pp times the stages of a rank)"
        )
    return _stages_of(_counts(costs, stages, None if owners is None else tuple(owners)))


@functools.lru_cache(maxsize=1024)  # a search asks for the same again and again
def _counts(costs: Costs, stages: int, owners: tuple[int, ...] | None) -> Sequence[int]:
    """Blocks of each stage."""
    slowest = _slowest_stage(costs, stages)
    shared = owners is not None and len(set(owners)) < stages
    if owners is not None and shared and len(set(costs.blocks)) == 1:
        return _fill_ranks(costs, owners, slowest)
    return _even_counts(costs, stages, slowest)


def _stages_of(counts: Sequence[int]) -> list[Stage]:
    out, start = [], 0
    for index, count in enumerate(counts):
        out.append(Stage(index == 0, range(start, start + count), index == len(counts) - 1))
        start += count
    return out


def _sums(costs: Costs) -> list[int]:
    sums = [0]
    for block in costs.blocks:
        sums.append(sums[-1] + block)
    return sums


def _extra(costs: Costs, stage: int, stages: int) -> int:
    return costs.embedding * (stage == 0) + costs.head * (stage == stages - 1)


def _slowest_stage(costs: Costs, stages: int) -> int:
    """The least possible cost of the slowest stage: best[n] is that of the first n blocks in the stages so far."""
    sums, total = _sums(costs), len(costs.blocks)
    best = {0: 0}
    for stage in range(stages):
        extra, left = _extra(costs, stage, stages), stages - 1 - stage
        ends = range(stage + 1, total - left + 1) if left else (total,)
        best = {
            end: min(max(before, sums[end] - sums[start] + extra) for start, before in best.items() if start < end)
            for end in ends
        }
    return best[total]


def _even_counts(costs: Costs, stages: int, slowest: int) -> tuple[int, ...]:
    """Blocks of each stage: the least sum of squares with no stage above `slowest`, then the fewest blocks early."""
    sums, total = _sums(costs), len(costs.blocks)
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(stages):
        extra = _extra(costs, stage, stages)
        reached: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (squares, counts) in best.items():
            for end in range(start + 1, total - (stages - 1 - stage) + 1):
                cost = sums[end] - sums[start] + extra
                if cost > slowest:
                    break
                found = (squares + cost**2, (*counts, end - start))
                reached[end] = min(reached.get(end, found), found)
        best = reached
    return best[total][1]


def _fill_ranks(costs: Costs, owners: Sequence[int], slowest: int) -> tuple[int, ...]:
    """Blocks of each stage, all costing the same: one by one to the stage that makes its rank, then itself, cost least.

    No stage goes above `slowest`; ties go to the later rank and stage.
    """
    block, stages = costs.blocks[0], len(owners)
    load = [_extra(costs, stage, stages) + block for stage in range(stages)]
    of_rank = {rank: sum(load[s] for s in range(stages) if owners[s] == rank) for rank in owners}
    counts = [1] * stages
    for _ in range(len(costs.blocks) - stages):
        free = (stage for stage in range(stages) if load[stage] + block <= slowest)
        stage = min(free, key=lambda s: (of_rank[owners[s]], load[s], -owners[s], -s))
        counts[stage] += 1
        load[stage] += block
        of_rank[owners[stage]] += block
    return tuple(counts)


def parse_split(text: str, layers: int, stages: int | None = None) -> list[Stage]:
    """Read a split written by hand, such as `E t*3 | t*4 | t*3 H`.

    Stages are separated by `|`, and their parts by blanks: `E` is the embedding (first in the first stage), `t` one
    block and `t*N` N blocks, `H` the last norm, the head and the loss (last in the last stage). A stage may be `E` or
    `H` alone.

    Args:
        layers: blocks of the model, all of which must be placed.
        stages: how many there must be; any number if None.

    Raises:
        ValueError: naming the position in the text, the rule, and a right example.
    """
    pieces = text.split("|")
    wanted = min(stages or len(pieces), layers)
    even = _stages_of([layers * (n + 1) // wanted - layers * n // wanted for n in range(wanted)])
    hint = f"a split of {layers} blocks in {wanted} stages is {' | '.join(map(str, even))!r}"
    counts, offset = [], 0
    for index, piece in enumerate(pieces):
        try:
            counts.append(_parse_stage(piece, offset, first=index == 0, last=index == len(pieces) - 1))
        except ValueError as error:
            raise ValueError(f"pipeline.split={text!r}, stage {index + 1}, {error}; {hint}") from None
        offset += len(piece) + 1
    if stages is not None and len(counts) != stages:
        raise ValueError(f"pipeline.split={text!r} has {len(counts)} stages, and there must be {stages}; {hint}")
    if sum(counts) != layers:
        raise ValueError(f"pipeline.split={text!r} places {sum(counts)} blocks, and the model has {layers}; {hint}")
    return _stages_of(counts)


def _parse_stage(piece: str, offset: int, *, first: bool, last: bool) -> int:
    """Blocks of one stage of a split; `offset` is where it starts in the whole text."""
    words = [(match.group(), offset + match.start()) for match in re.finditer(r"\S+", piece)]
    if not words:
        raise ValueError(f"position {offset}: the stage is empty")
    count = 0
    for index, (word, position) in enumerate(words):
        if word == "E":
            if not first or index:
                raise ValueError(f"position {position}: E, the embedding, comes first in the first stage")
        elif word == "H":
            if not last or index < len(words) - 1:
                raise ValueError(f"position {position}: H, the head, comes last in the last stage")
        elif word == "t":
            count += 1
        elif re.fullmatch(r"t\*[1-9]\d*", word, re.ASCII):
            count += int(word[2:])
        else:
            raise ValueError(f"position {position}: {word!r} is none of E, t, t*N (N of 1 or more) and H")
    if first and words[0][0] != "E":
        raise ValueError(f"position {words[0][1]}: the first stage starts with E, the embedding")
    if last and words[-1][0] != "H":
        raise ValueError(f"position {words[-1][1]}: the last stage ends with H, the head")
    return count


def describe(stages: Sequence[Stage], costs: Costs, owners: Sequence[int]) -> str:
    """A table of the split: a line a stage with its rank, parts and share of the cost, and one for the slowest rank."""
    total = sum(costs.of(stage) for stage in stages)
    parts = [str(stage) for stage in stages]
    width = max(len("parts"), *map(len, parts))
    lines = [f"stage  rank  {'parts':<{width}}  share of cost"]
    ranks = dict.fromkeys(sorted(owners), 0)
    for index, (stage, part, rank) in enumerate(zip(stages, parts, owners, strict=True)):
        lines.append(f"{index:>5}  {rank:>4}  {part:<{width}}  {costs.of(stage) / total:>12.1%}")
        ranks[rank] += costs.of(stage)
    slowest = max(ranks, key=lambda rank: ranks[rank])
    lines.append(
        f"slowest rank: {slowest}, {ranks[slowest] / total:.1%} of the cost, where an even share is "
        f"{1 / len(ranks):.1%}"
    )
    return "\n".join(lines)
