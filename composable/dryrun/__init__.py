"""A step of the real code for any rank of a world of any size, in one process, on fake tensors."""
