"""What is found out about topologies: comparisons, recommendations and tables."""
