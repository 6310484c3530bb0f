"""Pages for a browser, each one file that loads nothing over the network."""
