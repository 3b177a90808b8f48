"""What does not combine, and what does nothing where it stands; printed by this room itself."""
