"""The ties between a program and the code that it is made of: lines, and names of values."""
