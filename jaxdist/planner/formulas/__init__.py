"""What the search asks of a model: a decoder, whose layers are known, or any other, traced."""
