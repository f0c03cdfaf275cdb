"""Faults on purpose: what may go wrong, where, and when; campaigns of them; where they end."""
