"""Activation checkpointing of modules."""
