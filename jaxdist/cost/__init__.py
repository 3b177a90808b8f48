"""The predicted cost of a computation: FLOPs, bytes, time and energy."""
