"""Pieces of ejected files: each is a section of one, and a module that can be checked."""
