"""The parts of `benchmarks.real_noise`: a simulated camera, scenes, methods, runner, report and figure."""
