"""Time and peak memory of the package through its commits, by airspeed velocity (``asv.conf.json``)."""
