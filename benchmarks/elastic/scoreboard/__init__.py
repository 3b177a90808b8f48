"""The scoreboard: faults on purpose, so many of each, and what the goals come to."""
