"""Faults that really happen: kills, signals, full disks, dead workers, a second writer, a clock that goes back."""
