"""What runs load of checkpoints beside their own whole state."""
