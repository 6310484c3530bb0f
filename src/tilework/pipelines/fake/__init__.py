"""Model folders of real size with random weights, for measuring time and memory without a download."""
