"""The formulas of the search, for decoders and for other models.

The formulas for decoders know the layers. The formulas for other models use a trace of the step.
"""
