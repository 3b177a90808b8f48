"""The same bits on any number of devices: a batch in logical shards, added up in a fixed order."""
