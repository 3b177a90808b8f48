"""Pipeline parallelism: stages of a model, and schedules that are lowered to one program."""
