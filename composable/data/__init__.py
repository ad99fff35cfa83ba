"""Tokens on disk, the order samples are read in, rows cut from them, and the loaders of training and validation."""
