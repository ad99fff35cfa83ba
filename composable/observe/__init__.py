"""What a run shows of itself: metrics, progress, step times, memory, profiles."""
