"""Which plan should train a model on a pod: searched by formulas, confirmed by compiling."""
