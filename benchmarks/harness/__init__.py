"""What all benchmarks share: processes, clocks, rounds, results and their origin."""
