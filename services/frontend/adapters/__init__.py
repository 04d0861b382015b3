"""Other contracts than our own, served by the same frontend."""
