"""Pure state machines that exchange messages between workers and one range, once and in order."""
