"""What a config would cost, read from its compiled program."""
