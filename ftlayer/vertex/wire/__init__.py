"""Calls and replies as bytes: their fields, frames, and what is checked of them."""
