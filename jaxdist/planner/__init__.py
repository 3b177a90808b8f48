"""The planner, which searches for the fastest plans of a model on given chips.

Formulas give the memory and time of each plan. On request, the compiler confirms the best plans.
"""
