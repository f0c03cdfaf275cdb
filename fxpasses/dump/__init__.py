"""Graphs written down: as Python that runs, as a difference, as JSON that reads back, as DOT."""
