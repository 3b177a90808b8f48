"""What the processes of a generation were at before it was lost, and which of them were slow."""
