"""The training of a part of a model: frozen parameters and adapters."""
