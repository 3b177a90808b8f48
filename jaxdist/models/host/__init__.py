"""Parameters of models in the host's memory."""
