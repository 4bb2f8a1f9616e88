"""Compressions: what is sent in place of a bucket's values, rounded, quantized, sparse or of low rank."""
