"""Few rows in which every combination of a few factors' values occurs: what stands for all rows of a large matrix."""

import itertools
import random
from collections import defaultdict
from collections.abc import Sequence

Row = dict[str, object]


def combinations(row: Row, strength: int) -> list[tuple]:
    """The combinations of `strength` factors' values in a row; a factor that does not apply (None) is in none."""
    pairs = [pair for pair in row.items() if pair[1] is not None]
    return list(itertools.combinations(pairs, strength))


def covering(rows: Sequence[Row], strength: int, seed: int = 0) -> list[Row]:
    """A small choice of rows in which each combination occurs that occurs in any row; always the same choice.

    Greedy: the rarest combination that is missing is brought by the row, among a few that have it, that brings most.
    """
    draw = random.Random(seed)
    where: dict[tuple, list[int]] = defaultdict(list)
    brought = [combinations(row, strength) for row in rows]
    for index, found in enumerate(brought):
        for combination in found:
            where[combination].append(index)
    missing, chosen = set(where), []
    for combination in sorted(where, key=lambda c: (len(where[c]), str(c))):
        if combination in missing:
            candidates = draw.sample(where[combination], min(25, len(where[combination])))
            best = max(candidates, key=lambda index: sum(c in missing for c in brought[index]))
            missing.difference_update(brought[best])
            chosen.append(rows[best])
    return chosen
