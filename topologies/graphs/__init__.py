"""Graphs and what is made of them: files, weights for their edges, their matchings and their spectra."""
