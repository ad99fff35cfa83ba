"""Mixture of experts: parts that work on one process and, given a process group, on many."""
