"""The hooks that observe a run: traces of its steps, and the use of its time."""
