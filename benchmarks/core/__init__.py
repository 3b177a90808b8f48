"""The harness of all benches: interleaved timing, reports, processes, hosts, recorded runs."""
