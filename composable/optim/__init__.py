"""From gradients to updated weights: optimizers, learning-rate schedules and clipping, whatever the sharding."""
