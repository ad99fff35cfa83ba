"""Saving by several ranks in one process, without a process group: what each of them does, in turn."""

import contextlib
import sys
from collections.abc import Mapping, Sequence

from composable.checkpoint.per_rank import write_own_files
from composable.checkpoint.plan import SectionPlan, owned_parts, plan_sections, table_of
from composable.checkpoint.remote import as_folder
from composable.checkpoint.shards import Piece

Held = Mapping[str, Mapping[str, Piece]]  # section -> name -> piece


def save_as_ranks(folder, ranks: Sequence[Held], writer: str, max_file_size: int = 10**9) -> list[SectionPlan]:
    """Save what each rank holds, and give the plan."""
    module, folder = sys.modules["composable.checkpoint.save"], as_folder(folder)
    sections = plan_sections([table_of(held) for held in ranks], max_file_size, writer)
    with contextlib.ExitStack() as stack:
        module._claim(stack, folder, False)
        module._create(folder, sections)
        write = write_own_files if writer == "per_rank" else module._write
        checksums = [
            write(folder, sections, owned_parts(sections, held, rank), rank) for rank, held in enumerate(ranks)
        ]
        module.finish(folder, sections, {"config.json": "{}"}, checksums)
    return sections
