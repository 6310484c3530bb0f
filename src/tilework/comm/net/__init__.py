"""Framed TCP between nodes: frames with a checksum and an epoch, messages by schema, files. Reads no pickle."""
