"""The platform on which a program runs: its environment, hardware, topology and processes."""
