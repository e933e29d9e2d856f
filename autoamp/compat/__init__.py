"""Neighbours that need code of ours: one room each."""
