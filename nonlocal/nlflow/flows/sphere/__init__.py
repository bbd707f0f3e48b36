"""Tokens on the sphere: layers of self-attention with their norm, as flows, and steps that stay on it."""

from nlflow.flows.sphere.flow import SphereFlow, on_sphere
from nlflow.flows.sphere.steps import GeodesicEuler, GeodesicMidpoint, LayerStep

__all__ = ["GeodesicEuler", "GeodesicMidpoint", "LayerStep", "SphereFlow", "on_sphere"]
