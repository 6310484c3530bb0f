"""All pairs of options of `tilework serve`: which are refused, and by what sentence; the others serve everything.

`samples` has values of each option, `refused` what does not go together, `covering` makes commands of them, `served`
starts one and calls everything, and `case` is the measurement.
"""
