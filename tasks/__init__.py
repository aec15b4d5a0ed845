"""Tasks: each file is a prompt, a data recipe, a reward and a toy. Importing a file registers its reward.

A file may define these names, and an environment in envs/ too:

- `rows(cfg)` yields the rows of a published dataset, `toy(n, split, seed)` those of generated data, and
  `scenes(split, seed)` the generated images with their questions that the toy and the demo draw from;
- `INSTRUCTION` is the text that `--instruction TASK` appends to prompts, `TOY_INSTRUCTION` that of generated prompts;
- `DEFAULTS` holds the task's own defaults of prepare_data.py's flags;
- `ANSWER_TYPES` and `TOY_TYPES` name the kinds of answers, of all rows and of generated ones;
- `answerable(truth, grade)` says whether a truth can be graded;
- `DEMO` changes settings of demo.py, `ENV` is the environment that the demo plays;
- `expert(example, ...)` plays the demo's environment well, and `USUAL` is what the demo's lazy annotator answers.
"""
