"""The applications: experiments, sweeps and their report, benchmarks, the probe of a cluster."""
