"""Probes of models."""
