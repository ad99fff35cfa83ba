"""Checkpoints that are Hugging Face safetensors folders, written in place by all ranks and read in any layout."""

from composable.checkpoint.folder import is_complete, latest, prune, step_folder
from composable.checkpoint.listing import list_folder
from composable.checkpoint.load import load
from composable.checkpoint.save import save
from composable.checkpoint.shards import Box, Piece, local_box

__all__ = ["Box", "Piece", "is_complete", "latest", "list_folder", "load", "local_box", "prune", "save", "step_folder"]
