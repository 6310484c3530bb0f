"""What `tilework plan` is asked, how it finds the answer, and how it shows it. Needs no torch."""
