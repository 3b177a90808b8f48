"""The types of a step's values along each mesh axis, derived from the program alone.

A type (`Kind`) says how the values of the devices along an axis make up the value that a single
device would compute: each device has the whole value, a shard, or a term of a sum, for example.
"""
