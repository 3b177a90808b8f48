"""Flight records of the last phases before a failure, and the detection of slow processes."""
