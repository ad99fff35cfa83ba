"""Checkpoints in the forms of others: a format is one file, with what reads it and, where it is written, what does."""
