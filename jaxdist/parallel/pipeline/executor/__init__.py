"""What runs a schedule inside one compiled program."""
