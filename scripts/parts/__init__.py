"""What the benchmarks and the proofs of this folder are made of; none of it is a command."""
