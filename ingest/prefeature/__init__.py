"""The v4 teacher-tensor dataset: cases, teachers, rollout, durable files, merge, validation, persistence and reading."""
