"""Cases that need a GPU, with models of real size and random weights; without one they run small, as a rehearsal."""
