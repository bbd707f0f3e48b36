"""Loops, devices, threads, memory and worker processes."""
