"""Pipeline schedules as tables of tasks: generate, check, time, draw, read and write them."""
