"""The building blocks of experiments besides the wrapper: data, its partition over ranks, models, records and figures.

Nothing is imported here: optional packages (scikit-learn, matplotlib, tensorboard) are loaded by the functions that use
them, so that ``import gossip`` stays fast. Import the modules: ``from gossip.lab.experiments import datasets``.
"""
