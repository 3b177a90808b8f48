"""The guarantee of the same bits on any number of devices, by logical shards and a fixed order."""
