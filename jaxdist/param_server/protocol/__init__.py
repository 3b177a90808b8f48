"""Messages between workers and one range, exactly once and in order, as pure state machines."""
