"""When things happen: the order of computation and communication, and the proof that it is kept."""
