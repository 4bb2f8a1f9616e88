"""What experiments need besides the wrapper: data, how it is divided over ranks, models, records and figures.

Nothing is imported here: optional packages (scikit-learn, matplotlib, tensorboard) are loaded by the functions that use
them, so that ``import gossip`` stays small. Import the modules: ``from gossip.lab.experiments import data``.
"""
