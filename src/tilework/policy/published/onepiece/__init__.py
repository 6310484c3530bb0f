"""OnePiece: stages have instances of their own, which pull requests; what is more than they can do is refused."""
