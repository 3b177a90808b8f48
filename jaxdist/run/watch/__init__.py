"""What watches a run while it lasts: traces of its steps, and where its time goes."""
