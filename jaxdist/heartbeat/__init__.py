"""The link between a training process and its agent: heartbeats, fences, journals and records."""
