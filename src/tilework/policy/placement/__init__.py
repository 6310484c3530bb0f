"""Owns the placement of stages: which device holds which stages of a pipeline, and when that should change.

Pure functions: counts, times and bytes in, a placement out. They know no controller, no clock and no cost table, and no
policy; of a pipeline they know the roles of its stages. A placement is for one pipeline, or for several whose stages
have the same weights.

Source: TridentServe §5.3, §6.1, appendices C.1 and E.2. Formulas and listings are missing in the text that we have;
each module says what stands in for them.
"""
