"""The loading of checkpoints: the states with which runs begin, and parts of other runs' states."""
