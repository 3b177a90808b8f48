"""The types of a step's values along each mesh axis, derived from the program without running it.

A type (`Kind`) describes how the values of the devices along an axis make up the value that a
single device would compute. For example, each device has the whole value, a shard, or a term of a
sum.
"""
