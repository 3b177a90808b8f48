"""The numbers of a run: on disk, on the display during the run, and in a picture of the loss."""
