"""Plans drawn at random, each compared with a single device."""
