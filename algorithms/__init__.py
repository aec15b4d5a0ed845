"""Methods beyond GRPO and its relatives, one per file.

Each file registers what it adds with `grpo.register_method` and the decorators of grpo.py. Its settings, a dataclass
`Settings`, become part of the run's settings (_registry.py). A file that is deleted takes its settings and presets with
it. Helpers have names that begin with _.
"""
