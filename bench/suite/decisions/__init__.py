"""Whether two revisions of Tilework decide alike.

Owns what is recorded, how old names become new ones, and the comparison. Must not know how Tilework is built inside:
`subject` alone touches it, by its command line wherever that will do.
"""
