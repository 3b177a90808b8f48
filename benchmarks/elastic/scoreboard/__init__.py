"""The scoreboard: trials of injected faults, each row with a goal and its result."""
