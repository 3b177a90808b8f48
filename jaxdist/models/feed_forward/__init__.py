"""The feed-forward layers of transformers: dense, or mixtures of experts."""
