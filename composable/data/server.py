"""What the fork server of data workers imports first, and nobody else: it leaves the trainer's process group.

A signal that is sent to the whole group (torchrun's SIGTERM, Ctrl-C) is for the trainer, which saves and then ends its
workers; they must not be gone before. Workers of a trainer that was killed end with it (`loader._start_worker`).
"""

import os

os.setpgid(0, 0)

import composable.data.loader  # noqa: E402, F401  (workers fork with all of it in memory)
