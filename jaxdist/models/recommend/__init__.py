"""Recommenders: tables of rows that are looked up by id, and their models and losses."""
