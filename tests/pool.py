"""One pool of ranks for the whole test run: processes that stay alive, a fresh process group for every call.

Importing torch dominates a start, so a fork server imports it once; the store is hosted by the test process, and each
call takes a prefix of its own.
"""

import contextlib
import datetime
import multiprocessing
import multiprocessing.connection
import os
import pickle
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from composable._torch import forget_process_groups

WORN = 100
"""native threads beyond which a process is replaced: gloo leaves some behind with every process group"""
PRELOAD = [
    "torch",
    "composable.train",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
]


class RankError(AssertionError):
    """A rank raised; the message holds the tracebacks of all ranks that did."""


def _serve(connection: multiprocessing.connection.Connection, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        call, rank, world, timeout, function, args, kwargs = pickle.loads(message)
        try:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"call-{call}", store),
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=timeout),
            )
            answer = (True, function(*args, **kwargs))
        except BaseException as error:
            answer = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
            forget_process_groups()
        connection.send_bytes(pickle.dumps((*answer, len(os.listdir("/proc/self/task")))))


class Pool:
    """Ranks on call: `run(n, function, *args)` gives the list of what `function` returned on each of n ranks."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.workers: list[tuple[Any, multiprocessing.connection.Connection]] = []
        self.calls = 0

    def _start(self, count: int) -> None:
        while len(self.workers) < count:
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=_serve, args=(theirs, self.store.port), daemon=False)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on `world` ranks with a default gloo group; RankError if any raised."""
        self._start(world)
        self.calls += 1
        waiting = {}
        for rank, (_, connection) in enumerate(self.workers[:world]):
            message = (self.calls, rank, world, timeout, function, args, kwargs)
            connection.send_bytes(pickle.dumps(message))
            waiting[connection] = rank
        results: list[Any] = [None] * world
        errors: dict[int, str] = {}
        worn: list[int] = []
        deadline = time.monotonic() + timeout
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    fine, value, threads = pickle.loads(connection.recv_bytes())
                except EOFError:
                    fine, value, threads = False, "the process died", 0
                if threads > WORN:
                    worn.append(rank)
                if fine:
                    results[rank] = value
                else:
                    errors[rank] = value
                    deadline = min(deadline, time.monotonic() + 10)
        if waiting or errors:
            late = "" if not waiting else f"\nranks {sorted(waiting.values())} never answered"
            self.close()
            raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())) + late)
        for rank in sorted(worn, reverse=True):
            self._stop(*self.workers.pop(rank))
        return results

    @staticmethod
    def _stop(process: Any, connection: multiprocessing.connection.Connection) -> None:
        connection.close()
        process.kill()
        process.join()

    def close(self) -> None:
        for process, connection in self.workers:
            self._stop(process, connection)
        self.workers = []
