"""Recommenders: tables of rows that are looked up by id, and the models and losses on them."""
