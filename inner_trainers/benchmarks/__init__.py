"""Benchmarks from files and generators: verifiers, dimensions, adapters."""
