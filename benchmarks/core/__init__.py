"""What all benches share: interleaved timing, reports, processes, recorded runs."""
