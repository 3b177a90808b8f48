"""Plans drawn at random, each against one device."""
