"""Loggers: destinations of the records of a run besides the JSON lines that its ranks write.

Nothing is imported here: TensorBoard, wandb and mlflow are imported by the loggers that use them, when selected.
"""
