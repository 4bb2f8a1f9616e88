"""What is found out about topologies: descriptions, comparisons, recommendations, tables and the gallery."""
