"""Owns the JSON that goes in and out, and its OpenAPI document."""
