"""Which plan a model should be trained by on a pod: searched by formulas, confirmed by compiling."""
