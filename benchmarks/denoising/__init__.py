"""The parts of `benchmarks.denoise_quality`: methods, tasks, cost; then targets, figure and report."""
