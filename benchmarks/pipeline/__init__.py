"""The bench `jaxdist bench pipeline`: memory, formulas, time, and a comparison with torch."""
