"""The drawing of timelines as text, as pictures and as traces."""
