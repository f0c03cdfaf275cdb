"""Guards: what notices numbers that no correct computation made, and what happens then."""
