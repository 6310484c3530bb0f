"""What `tilework doctor` looks at: whether this machine can serve, and what to do if not. Starts nothing."""
