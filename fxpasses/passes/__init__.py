"""The passes, one a file. They are listed in the entry-point group `fxpasses.passes`."""
