"""Where the records of a run go besides the JSON lines that its ranks write.

Nothing is imported here: TensorBoard, wandb and mlflow are loaded by the loggers that use them, once they are chosen.
"""
