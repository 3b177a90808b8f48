"""Pieces of ejected files: each is a section of a file, and a module that can be type-checked."""
