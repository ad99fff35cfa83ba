"""Few rows in which every combination of a few factors' values occurs: what stands for all rows of a large matrix."""

import heapq
import itertools
from collections.abc import Sequence

Row = dict[str, object]


def combinations(row: Row, strength: int) -> list[tuple]:
    """The combinations of `strength` factors' values in a row; a factor that does not apply (None) is in none."""
    pairs = [pair for pair in row.items() if pair[1] is not None]
    return list(itertools.combinations(pairs, strength))


def covering(rows: Sequence[Row], strength: int) -> list[Row]:
    """A small choice of rows in which each combination occurs that occurs in any row; always the same choice.

    Greedy: next comes the row that brings most missing combinations, the first of equals. What a row brings only
    becomes less, so a row that still brings as much as when it was last looked at is better than all below it.
    """
    names: dict[tuple, int] = {}
    brings = [[names.setdefault(c, len(names)) for c in combinations(row, strength)] for row in rows]
    missing, chosen = set(names.values()), []
    heap = [(-len(found), index) for index, found in enumerate(brings)]
    heapq.heapify(heap)
    while missing:
        _, index = heapq.heappop(heap)
        now = -sum(c in missing for c in brings[index])
        if heap and (now, index) > heap[0]:
            heapq.heappush(heap, (now, index))
        else:
            missing.difference_update(brings[index])
            chosen.append(rows[index])
    return chosen
