"""The connections of a compiled program to its source code: lines of code, and names of values."""
