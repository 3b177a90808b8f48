"""The link between a training process and the agent that started it; the agent imports it too."""
