"""Pipeline schedules as tables of tasks: generation, checks, simulation, drawing and files."""
